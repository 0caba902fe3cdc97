//! `#[derive(Flatten)]` for structs and enums that contain tensors. The trait and its rules are in the crate `consort`.
#![forbid(unsafe_code)]

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{Data, DeriveInput, Field, Fields, Ident, LitStr, Variant, parse_macro_input, parse_quote};

/// Implements `consort::Flatten`: every field is visited in the order of its declaration. `#[flatten(equal_over = "dp, tp")]`
/// declares the tensors of a field equal over axes.
#[proc_macro_derive(Flatten, attributes(flatten))]
pub fn flatten(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    implement(input).unwrap_or_else(syn::Error::into_compile_error).into()
}

fn implement(mut input: DeriveInput) -> syn::Result<TokenStream> {
    let arms: Vec<(TokenStream, TokenStream)> = match &input.data {
        Data::Struct(data) => vec![arms(&quote!(Self), None, &data.fields)?],
        Data::Enum(data) => {
            let arm =
                |Variant { ident, fields, .. }: &Variant| arms(&quote!(Self::#ident), Some(ident), fields);
            data.variants.iter().map(arm).collect::<syn::Result<_>>()?
        }
        Data::Union(_) => {
            return Err(syn::Error::new_spanned(&input.ident, "Flatten: expected a struct or an enum"));
        }
    };
    let parameters: Vec<Ident> =
        input.generics.type_params().map(|parameter| parameter.ident.clone()).collect();
    let bounds = input.generics.make_where_clause();
    for parameter in parameters {
        bounds.predicates.push(parse_quote!(#parameter: ::consort::Flatten));
    }
    let (name, (generics, arguments, bounds)) = (&input.ident, input.generics.split_for_impl());
    let (visits, maps): (Vec<_>, Vec<_>) = arms.into_iter().unzip();
    Ok(quote! {
        impl #generics ::consort::Flatten for #name #arguments #bounds {
            fn visit(&self, visit: &mut dyn ::consort::Visit) {
                match self { #(#visits)* }
            }
            fn map(&self, map: &mut dyn ::consort::Map) -> Self {
                match self { #(#maps)* }
            }
        }
    })
}

/// The match arms of a struct or variant: one that visits its name and then its fields, one that maps its fields.
fn arms(
    path: &TokenStream,
    variant: Option<&Ident>,
    fields: &Fields,
) -> syn::Result<(TokenStream, TokenStream)> {
    let names: Vec<Ident> = match fields {
        Fields::Named(fields) => fields.named.iter().filter_map(|field| field.ident.clone()).collect(),
        Fields::Unnamed(fields) => (0..fields.unnamed.len()).map(|i| format_ident!("field{i}")).collect(),
        Fields::Unit => Vec::new(),
    };
    let pattern = match fields {
        Fields::Named(_) => quote!({ #(#names),* }),
        Fields::Unnamed(_) => quote!((#(#names),*)),
        Fields::Unit => quote!(),
    };
    let made = match fields {
        Fields::Named(_) => quote!({ #(#names: ::consort::Flatten::map(#names, map)),* }),
        Fields::Unnamed(_) => quote!((#(::consort::Flatten::map(#names, map)),*)),
        Fields::Unit => quote!(),
    };
    let name = variant.map(|variant| {
        let name = variant.to_string();
        quote!(visit.setting(::consort::Static::Text(#name));)
    });
    let visits = names.iter().zip(fields).enumerate();
    let visits =
        visits.map(|(place, (name, field))| visit(place, name, field)).collect::<syn::Result<Vec<_>>>()?;
    let visit = quote!(#path #pattern => { #name #(#visits)* });
    let map = quote!(#path #pattern => #path #made,);
    Ok((visit, map))
}

/// The statements that visit a field.
fn visit(place: usize, name: &Ident, field: &Field) -> syn::Result<TokenStream> {
    let mut axes: Option<Vec<String>> = None;
    for attribute in field.attrs.iter().filter(|attribute| attribute.path().is_ident("flatten")) {
        attribute.parse_nested_meta(|meta| {
            if !meta.path.is_ident("equal_over") {
                return Err(meta.error("Flatten: expected `equal_over = \"axis, ..\"`"));
            }
            let names: LitStr = meta.value()?.parse()?;
            let list = names.value().split(',').map(|name| name.trim().to_string()).collect::<Vec<_>>();
            if list.iter().any(String::is_empty) {
                return Err(syn::Error::new_spanned(
                    names,
                    "Flatten: expected names of axes, as in \"dp, tp\"",
                ));
            }
            axes = Some(list);
            Ok(())
        })?;
    }
    let visited = match axes {
        None => quote!(::consort::Flatten::visit(#name, visit);),
        Some(axes) => {
            let field = name.to_string();
            quote! {
                ::consort::Flatten::visit(#name, &mut ::consort::EqualOver { visit: &mut *visit, field: #field, axes: &[#(#axes),*] });
            }
        }
    };
    let field = field.ident.as_ref().map_or(place.to_string(), ToString::to_string);
    Ok(quote!(visit.enter(&#field); #visited visit.leave();))
}
