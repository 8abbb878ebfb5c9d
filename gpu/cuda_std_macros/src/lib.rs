//! `#[kernel]`: one source, an entry of the PTX module and an entry for the CPU device.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::parse::{Parse, ParseStream};
use syn::{Expr, FnArg, Ident, ItemFn, ReturnType, Token, parse_macro_input};

/// `threads = N, blocks = B`: constants.
struct Bounds {
    threads: Expr,
    blocks: Expr,
}

impl Parse for Bounds {
    fn parse(input: ParseStream) -> syn::Result<Self> {
        let value = |name: &str| {
            let found: Ident = input.parse()?;
            if found != name {
                return Err(syn::Error::new(
                    found.span(),
                    format!("expected `threads = N, blocks = B`, not `{found}`"),
                ));
            }
            input.parse::<Token![=]>()?;
            input.parse::<Expr>()
        };
        let threads = value("threads")?;
        input.parse::<Token![,]>()?;
        Ok(Self { threads, blocks: value("blocks")? })
    }
}

/// Marks a kernel: `#[kernel] pub fn name(a: NameArgs) { … }`, one `#[repr(C)]` argument struct, by value.
///
/// On `nvptx64` it becomes the entry `name`. On the CPU the function stays callable and `NAME`, a
/// `cuda_std::Kernel<NameArgs>`, is what launchers and tests pass to a device.
///
/// `#[kernel(threads = N, blocks = B)]` holds the kernel to as many registers as let `B` blocks of at most `N` threads
/// be on a multiprocessor at once: see `cuda_std::thread::launch_bounds`.
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    let bounds = if attr.is_empty() { None } else { Some(parse_macro_input!(attr as Bounds)) };
    let f = parse_macro_input!(item as ItemFn);
    let sig = &f.sig;
    if !matches!(sig.output, ReturnType::Default) {
        return error(&sig.output, "a kernel returns nothing");
    }
    if !sig.generics.params.is_empty() {
        return error(&sig.generics, "a kernel is not generic: write one entry for each instance");
    }
    let (pat, ty) = match (sig.inputs.first(), sig.inputs.len()) {
        (Some(FnArg::Typed(arg)), 1) => (&arg.pat, &arg.ty),
        _ => return error(&sig.inputs, "a kernel takes one argument struct by value"),
    };
    let (attrs, vis, name, body) = (&f.attrs, &f.vis, &sig.ident, &f.block);
    let text = name.to_string();
    let descriptor = format_ident!("{}", text.to_uppercase());
    let doc = format!("Descriptor of [`{text}`] for launching.");
    let (bounds, used) = match bounds {
        None => (None, None),
        Some(Bounds { threads, blocks }) => (
            Some(quote! { ::cuda_std::thread::launch_bounds::<{ #threads }, { #blocks }>(); }),
            Some(quote! { const _: [u32; 2] = [#threads, #blocks]; }),
        ),
    };
    quote! {
        #(#attrs)*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #vis extern "ptx-kernel" fn #name(#pat: #ty) {
            #bounds
            #body
        }

        #(#attrs)*
        #[cfg(not(target_arch = "nvptx64"))]
        #vis fn #name(#pat: #ty) #body

        #used

        #[doc = #doc]
        #[cfg(not(target_arch = "nvptx64"))]
        #vis static #descriptor: ::cuda_std::Kernel<#ty> = ::cuda_std::Kernel::new(#text, #name);
    }
    .into()
}

fn error(tokens: &impl quote::ToTokens, what: &str) -> TokenStream {
    syn::Error::new_spanned(tokens, what).to_compile_error().into()
}
