//! Every form of every collective, and cases of them for any number of ranks.

pub(crate) mod cases;
pub(crate) mod table;
