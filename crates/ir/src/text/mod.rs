//! Programs and plans as text: reading, printing, and the `; run:` lines beside them.
//!
//! The grammar is in `docs/ir.md`. One format serves from trace to plan; `print(parse(s)) == s` for every
//! text that the printer wrote.

mod cursor;
mod lexer;
mod parse;
mod print;
mod run_line;

pub use cursor::Cursor;
pub use lexer::ParseError;
pub use parse::{Parsed, parse};
pub use print::{node_text, print, print_used, print_with_lines};
pub use run_line::{Expect, RunArgs, RunLine, RunValue, directives, run_lines};
