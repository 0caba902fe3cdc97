//! A Llama-style model generates tokens, with its weights sharded over all ranks.
//!
//! ```text
//! cargo build --release -p consort-examples --example tp
//! consort run -n 4 -- target/release/examples/tp
//! ```

use std::process::ExitCode;

use consort::nn::{Config, Generator, Llama};
use consort::{Mesh, Result};

/// The tokens that one rank generates alone.
pub fn plain(mesh: &Mesh, config: &Config, key: i64, prompt: &[i64], n: usize) -> Result<Vec<i64>> {
    let me = mesh.my_rank()?;
    let alone = mesh.split("alone", Some(me as u32), 0)?;
    Llama::random(config, &alone, key)?.generate(prompt, n, None)
}

fn run() -> Result<bool> {
    let mesh = consort::init()?;
    let (config, prompt) = (Config { layers: 4, places: 64, ..Config::tiny() }, [1, 2, 3]);
    let model = Llama::random(&config, &mesh, 7)?;
    let eager = model.generate(&prompt, 24, None)?;
    let mut generator = Generator::new(model, config.places)?; // Its step is compiled.
    let compiled = generator.generate(&prompt, 24, None)?;
    let good = eager == compiled && eager == plain(&mesh, &config, 7, &prompt, 24)?;
    println!("{}", if good { format!("{eager:?}") } else { "other tokens than on one rank".to_string() });
    Ok(good)
}

fn main() -> ExitCode {
    match run() {
        Ok(good) => ExitCode::from(u8::from(!good)),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
