//! `#[kernel]`: one source, an entry of the PTX module and an entry for the CPU device.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::{FnArg, ItemFn, ReturnType, parse_macro_input};

/// Marks a kernel: `#[kernel] pub fn name(a: NameArgs) { … }`, one `#[repr(C)]` argument struct, by value.
///
/// On `nvptx64` it becomes the entry `name`. On the CPU the function stays callable and `NAME`, a
/// `cuda_std::Kernel<NameArgs>`, is what launchers and tests pass to a device.
#[proc_macro_attribute]
pub fn kernel(attr: TokenStream, item: TokenStream) -> TokenStream {
    if !attr.is_empty() {
        return error(&proc_macro2::TokenStream::from(attr), "#[kernel] takes no arguments");
    }
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
    quote! {
        #(#attrs)*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #vis extern "ptx-kernel" fn #name(#pat: #ty) #body

        #(#attrs)*
        #[cfg(not(target_arch = "nvptx64"))]
        #vis fn #name(#pat: #ty) #body

        #[doc = #doc]
        #[cfg(not(target_arch = "nvptx64"))]
        #vis static #descriptor: ::cuda_std::Kernel<#ty> = ::cuda_std::Kernel::new(#text, #name);
    }
    .into()
}

fn error(tokens: &impl quote::ToTokens, what: &str) -> TokenStream {
    syn::Error::new_spanned(tokens, what).to_compile_error().into()
}
