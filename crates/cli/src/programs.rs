//! The example programs of the library, as demos and benchmarks run them.

macro_rules! programs {
    ($($name:ident $path:literal;)*) => {$(
        #[path = $path]
        #[allow(dead_code, unreachable_pub, reason = "an example, with a main of its own")]
        pub(crate) mod $name;
    )*};
}

programs! {
    conv "../../consort/examples/conv.rs";
    halo "../../consort/examples/halo.rs";
    moe "../../consort/examples/moe.rs";
    ring_attention "../../consort/examples/ring_attention.rs";
    tp "../../consort/examples/tp.rs";
}

/// Paths of source files in a text as one reads them: without the way by which this program includes them.
pub(crate) fn source(text: &str) -> String {
    text.replace("crates/cli/src/../../", "crates/")
}
