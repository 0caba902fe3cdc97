//! The lines beside a program that say what to run and what must come out.
//!
//! ```text
//! ; run: @f([1, 2] | [10, 20], 3) == [22, 44]
//! ; run: @g(iota[4,4]) == 0.3333 +- 1e-4
//! ; run: @h([1]) fails: places in 0..3
//! ```
//!
//! Values of different ranks stand between bars; a single value is the same on all ranks. A scalar fills
//! the shape it meets, `iota` counts through it. `==` compares exactly (a NaN equals a NaN), unless `+-`
//! gives a tolerance, relative to the expected value and at least absolute.

use std::cell::Cell;
use std::collections::BTreeMap;

use consort_types::{Dtype, Rank};

use super::cursor::Cursor;
use super::lexer::ParseError;
use crate::entity::Value;
use crate::limits::{Excess, Resource};
use crate::literal::{Data, Literal};
use crate::mesh::Mesh;
use crate::ops::{EvalCx, check_numel};
use crate::program::Program;
use crate::types::Type;

/// A value as run lines write it; its element type comes from the program.
#[derive(Clone, Debug, PartialEq)]
pub enum RunValue {
    /// A number: as a float, and as an integer if it is one.
    Scalar(f64, Option<i64>),
    /// Values of one shape, stacked.
    List(Vec<RunValue>),
    /// 0, 1, 2, .. in row-major order, in this shape or the one it meets.
    Iota(Option<Vec<usize>>),
}

/// For each argument or result, a value for each rank or one for all.
pub type RunArgs = Vec<Vec<RunValue>>;

/// The expected outcome of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Expect {
    /// These results, within a tolerance.
    Results(RunArgs, f64),
    /// An error that contains this text.
    Fails(String),
    /// No expectation.
    Anything,
}

/// One run line.
#[derive(Clone, Debug, PartialEq)]
pub struct RunLine {
    /// Its line in the text, from 1.
    pub line: u32,
    /// The function.
    pub func: String,
    /// Its arguments.
    pub args: RunArgs,
    /// The expected outcome.
    pub expect: Expect,
}

/// The comments of a text that begin with a word and a colon: `(line, column, rest)`.
pub fn directives<'a>(text: &'a str, word: &str) -> Vec<(u32, u32, &'a str)> {
    let lines = text.lines().enumerate();
    let found = lines.filter_map(|(number, line)| {
        let rest = line.trim().strip_prefix(';')?.trim_start().strip_prefix(word)?.strip_prefix(':')?;
        let rest = rest.trim_start();
        let column = line.trim_end().chars().count() - rest.chars().count() + 1;
        Some((number as u32 + 1, column as u32, rest))
    });
    found.collect()
}

/// The run lines of a text.
pub fn run_lines(text: &str) -> Result<Vec<RunLine>, ParseError> {
    directives(text, "run").into_iter().map(|(line, column, rest)| run_line(line, column, rest)).collect()
}

fn run_line(line: u32, column: u32, text: &str) -> Result<RunLine, ParseError> {
    let at_line = |error: ParseError| ParseError { line, column: column - 1 + error.column, ..error };
    let (call, fails) = match text.split_once(" fails:") {
        Some((call, message)) => (call, Some(message.trim().to_string())),
        None => (text, None),
    };
    let mut cursor = Cursor::new(call, Mesh::default()).map_err(at_line)?;
    let read = || {
        cursor.expect("@")?;
        let func = cursor.next_token().to_string();
        cursor.expect("(")?;
        let args = cursor.list(")", by_rank)?;
        let expect = match fails {
            Some(message) => Expect::Fails(message),
            None if cursor.at_end() => Expect::Anything,
            None => {
                cursor.expect("==")?;
                let mut results = Vec::new();
                while !cursor.at_end() && cursor.peek() != "+" {
                    if !results.is_empty() {
                        cursor.expect(",")?;
                    }
                    results.push(by_rank(&mut cursor)?);
                }
                let mut tolerance = 0.0;
                if cursor.eat("+") {
                    cursor.expect("-")?;
                    tolerance = cursor.float()?;
                }
                Expect::Results(results, tolerance)
            }
        };
        if !cursor.at_end() {
            return Err(cursor.expected("the end of the line"));
        }
        Ok(RunLine { line, func, args, expect })
    };
    read().map_err(at_line)
}

fn by_rank(cursor: &mut Cursor<'_>) -> Result<Vec<RunValue>, ParseError> {
    let mut ranks = vec![literal(cursor)?];
    while cursor.eat("|") {
        ranks.push(literal(cursor)?);
    }
    Ok(ranks)
}

fn literal(cursor: &mut Cursor<'_>) -> Result<RunValue, ParseError> {
    if cursor.eat("[") {
        return Ok(RunValue::List(cursor.nested(|cursor| cursor.list("]", literal))?));
    }
    if cursor.eat("iota") {
        let shape = if cursor.eat("[") { Some(cursor.list("]", |c| c.number("a size"))?) } else { None };
        return Ok(RunValue::Iota(shape));
    }
    if matches!(cursor.peek(), "true" | "false") {
        let value = i64::from(cursor.next_token() == "true");
        return Ok(RunValue::Scalar(value as f64, Some(value)));
    }
    if cursor.at_integer() {
        let negative = cursor.peek() == "-";
        let value = cursor.integer()?;
        // The integer has lost the sign of -0.
        return Ok(RunValue::Scalar(if negative && value == 0 { -0.0 } else { value as f64 }, Some(value)));
    }
    Ok(RunValue::Scalar(cursor.float()?, None))
}

impl RunValue {
    /// The tensor of an element type. `shape` is the expected shape, if known.
    pub fn tensor(&self, dtype: Dtype, shape: Option<&[usize]>) -> Result<Literal, String> {
        let (low, high) = dtype.int_range();
        let float = |item: &RunValue| if let RunValue::Scalar(x, _) = item { *x } else { 0.0 };
        let int = |item: &RunValue| match item {
            RunValue::Scalar(_, Some(x)) if (low..=high).contains(x) => Ok(*x),
            RunValue::Scalar(x, _) => Err(format!("expected a value of {dtype}, got {x}")),
            _ => Err("expected a number".to_string()),
        };
        match self {
            RunValue::Scalar(..) => {
                let shape = shape.unwrap_or(&[]).to_vec();
                let n = elements(&shape)?;
                Ok(if dtype.is_float() {
                    Literal::floats(dtype, shape, vec![float(self); n])
                } else {
                    Literal::ints(dtype, shape, vec![int(self)?; n])
                })
            }
            RunValue::List(_) => {
                let (shape, mut items) = (self.shape()?, Vec::new());
                self.flatten(&mut items);
                if dtype.is_float() {
                    return Ok(Literal::floats(dtype, shape, items.into_iter().map(float).collect()));
                }
                Ok(Literal::ints(dtype, shape, items.into_iter().map(int).collect::<Result<_, _>>()?))
            }
            RunValue::Iota(own) => {
                let shape = own.as_deref().or(shape).ok_or("`iota` needs a shape here: iota[2,3]")?.to_vec();
                let n = elements(&shape)? as i64;
                Ok(if dtype.is_float() {
                    Literal::floats(dtype, shape, (0..n).map(|i| i as f64).collect())
                } else {
                    Literal::ints(dtype, shape, (0..n).collect())
                })
            }
        }
    }

    /// The same with a memory limit: adds the tensor's bytes to `taken`, which must not exceed `most`.
    fn tensor_within(
        &self,
        dtype: Dtype,
        shape: Option<&[usize]>,
        taken: &Cell<u64>,
        most: u64,
    ) -> Result<Literal, String> {
        let own = match self {
            RunValue::Scalar(..) => shape,
            // Its elements are in memory already.
            RunValue::List(_) => None,
            RunValue::Iota(own) => own.as_deref().or(shape),
        };
        let own = own.map_or(Ok(0), elements)?;
        taken.set(taken.get().saturating_add(8 * own as u64));
        Excess::check(Resource::Bytes, most, taken.get()).map_err(|excess| {
            format!("{excess}\n  note: give fewer or smaller arguments, or raise the limit")
        })?;
        self.tensor(dtype, shape)
    }

    fn shape(&self) -> Result<Vec<usize>, String> {
        let RunValue::List(items) = self else { return Ok(vec![]) };
        let mut shape = vec![items.len()];
        let Some((first, rest)) = items.split_first() else { return Ok(shape) };
        let inner = first.shape()?;
        for item in rest {
            if item.shape()? != inner {
                return Err("the rows of a list have different shapes".to_string());
            }
        }
        shape.extend(inner);
        Ok(shape)
    }

    fn flatten<'a>(&'a self, out: &mut Vec<&'a RunValue>) {
        match self {
            RunValue::List(items) => items.iter().for_each(|item| item.flatten(out)),
            other => out.push(other),
        }
    }
}

/// The number of elements of a shape; an error if a literal may not have as many.
fn elements(shape: &[usize]) -> Result<usize, String> {
    check_numel(shape).map_err(|error| error.to_string())?;
    Ok(shape.iter().product())
}

impl RunLine {
    /// The arguments of each rank.
    pub fn inputs(&self, program: &Program) -> Result<Vec<Vec<Literal>>, String> {
        self.inputs_within(program, u64::MAX)
    }

    /// The same, with a limit on the total `bytes` of all arguments as literals.
    pub fn inputs_within(&self, program: &Program, bytes: u64) -> Result<Vec<Vec<Literal>>, String> {
        let func = program.func(&self.func).ok_or_else(|| format!("there is no function @{}", self.func))?;
        if self.args.len() != func.body.params.len() {
            return Err(format!(
                "@{}: expected {} arguments, got {}",
                self.func,
                func.body.params.len(),
                self.args.len()
            ));
        }
        let params = || func.body.params.iter().zip(&self.args);
        let taken = Cell::new(0u64);
        let rank_inputs = |rank: u32| {
            let cx = EvalCx { mesh: &program.mesh, rank: Rank(rank), symbols: &BTreeMap::new() };
            let input = |(param, values): (&Value, &Vec<RunValue>)| {
                let literal =
                    for_rank(values, rank, program.mesh.n_ranks()).map_err(|e| format!("{param}: {e}"))?;
                match func.ty(*param) {
                    Some(Type::Tensor(ty)) => {
                        // A symbolic size is taken from the value.
                        let shape = ty.shape.iter().map(|size| cx.size(size)).collect::<Result<Vec<_>, _>>();
                        literal.tensor_within(ty.dtype, shape.ok().as_deref(), &taken, bytes)
                    }
                    Some(Type::Size(..)) => literal.tensor(Dtype::I64, Some(&[])),
                    _ => Err("a pending cannot be given as an argument".to_string()),
                }
                .map_err(|error| format!("{param}: {error}"))
            };
            params().map(input).collect()
        };
        (0..program.mesh.n_ranks()).map(rank_inputs).collect()
    }

    /// Checks the outcome against the expectation; the error says where it differs.
    pub fn check(
        &self,
        program: &Program,
        outcome: &Result<Vec<Vec<Literal>>, String>,
    ) -> Result<(), String> {
        let (expected, tolerance) = match (&self.expect, outcome) {
            (Expect::Anything, Ok(_)) => return Ok(()),
            (Expect::Fails(message), Err(error)) if error.contains(message) => return Ok(()),
            (Expect::Fails(message), Err(error)) => {
                return Err(format!("expected an error with `{message}`, got\n{error}"));
            }
            (Expect::Fails(message), Ok(_)) => {
                return Err(format!("expected an error with `{message}`, got results"));
            }
            (_, Err(error)) => return Err(error.clone()),
            (Expect::Results(expected, tolerance), Ok(_)) => (expected, *tolerance),
        };
        for (rank, results) in (0u32..).zip(outcome.iter().flatten()) {
            if results.len() != expected.len() {
                return Err(format!(
                    "rank {rank}: expected {} results, got {}",
                    expected.len(),
                    results.len()
                ));
            }
            for (i, (values, got)) in expected.iter().zip(results).enumerate() {
                let want =
                    for_rank(values, rank, program.mesh.n_ranks())?.tensor(got.dtype, Some(&got.shape))?;
                if want.shape != got.shape {
                    let (want, got) = (&want.shape, &got.shape);
                    return Err(format!("rank {rank}, result {i}: expected shape {want:?}, got {got:?}"));
                }
                if !Expect::close(&want, got, tolerance) {
                    return Err(format!(
                        "rank {rank}, result {i}: expected {}, got {}",
                        want.text(),
                        got.text()
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The value of a rank: its own, or the one for all.
fn for_rank(values: &[RunValue], rank: u32, n: u32) -> Result<&RunValue, String> {
    match values {
        [one] => Ok(one),
        many if many.len() == n as usize => Ok(&many[rank as usize]),
        many => Err(format!("expected one value or {n}, one for each rank, got {}", many.len())),
    }
}

impl Expect {
    /// Whether a tensor equals the expected one, within the tolerance.
    pub fn close(expected: &Literal, got: &Literal, tolerance: f64) -> bool {
        if tolerance == 0.0 {
            return expected.same(got);
        }
        match (&expected.data, &got.data) {
            (Data::Float(a), Data::Float(b)) => {
                let near = |(a, b): (&f64, &f64)| {
                    a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance * a.abs().max(1.0)
                };
                expected.dtype == got.dtype && expected.shape == got.shape && a.iter().zip(b).all(near)
            }
            _ => expected.same(got),
        }
    }
}
