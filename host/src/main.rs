fn main() -> std::process::ExitCode {
    kdtree::cli::main()
}
