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

/// A path of a source file as one reads it: without the way by which this program includes it.
pub(crate) fn source(path: &str) -> String {
    path.replace("crates/cli/src/../../", "crates/")
}
