//! The whole model against the numpy reference's goldens: plain and with trees, every format, both devices.

mod acceptance;
mod checkpoints;
mod chunks;
mod drafter;
mod formats;
mod goldens;
mod kv_f8;
mod overflow;
mod rounds;
mod sampling;
mod states;
#[path = "../support/mod.rs"]
mod support;

fn main() -> std::process::ExitCode {
    let mut suite = support::Suite::new();
    acceptance::cases(&mut suite);
    goldens::cases(&mut suite);
    kv_f8::cases(&mut suite);
    checkpoints::cases(&mut suite);
    chunks::cases(&mut suite);
    drafter::cases(&mut suite);
    formats::cases(&mut suite);
    overflow::cases(&mut suite);
    rounds::cases(&mut suite);
    sampling::cases(&mut suite);
    states::cases(&mut suite);
    suite.run()
}
