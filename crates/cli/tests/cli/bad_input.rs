//! Arguments and files that do not fit a program: one error, exit code 1, nothing printed.

use crate::scratch::{SUM, Scratch, npy, npy_f32, safetensors};

const SIZED: &str = "mesh ()

func @f(v0: f32[s0], v1: size<s0>) {
    return
}

func @g(v0: bf16[2]) {
    return
}
";

/// A folder with programs and one input that fits.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("sum.csr", SUM);
    scratch.write("sized.csr", SIZED);
    scratch.write("x.npy", npy_f32(&[1.0, 2.0]));
    scratch
}

/// Gives a file to `@sum` and demands this error about it.
#[track_caller]
fn refused(file: &[u8], error: &str) {
    let scratch = scratch();
    scratch.write("bad.npy", file);
    scratch.refuses("exec sum.csr -n 2 --input bad.npy", &format!("error: @sum: v0: bad.npy: {error}\n"));
}

#[test]
fn a_file_of_another_dtype_is_not_converted() {
    let note = "save it as float32, or declare the parameter as f64 and cast it in the program";
    refused(&npy("<f8", "(2,)", &[0; 16]), &format!("expected f32[2]{{tp}}, got f64[2]\n  note: {note}"));
    let error = "error: @g: v0: x.npy: expected bf16[2], got f32[2]\n  \
        note: npy has no bf16: give a BF16 tensor as FILE.safetensors:NAME\n";
    scratch().refuses("exec sized.csr -n 1 --func g --input x.npy", error);
}

#[test]
fn a_file_of_another_shape() {
    refused(&npy("<f4", "(2, 1)", &[0; 8]), "expected f32[2]{tp}, got f32[2,1]");
    refused(&npy("<f4", "(3,)", &[0; 12]), "expected f32[2]{tp}, got f32[3]");
    refused(&npy("<f4", "()", &[0; 4]), "expected f32[2]{tp}, got f32[]");
    let error = "error: @f: v1: x.npy: expected an integer or a file of i64[] for size<s0>, got f32[2]\n";
    scratch().refuses("exec sized.csr -n 1 --func f --input x.npy --input x.npy", error);
}

#[test]
fn a_file_that_is_no_npy() {
    refused(b"", "npy: expected a file that begins with `\\x93NUMPY`, got nothing");
    refused(b"1, 2\n", "npy: expected a file that begins with `\\x93NUMPY`, got `1, 2\\n`");
    let zip = "npy: expected a file that begins with `\\x93NUMPY`, got `PK\\x03\\x04\\x00\\x00`\n  \
        note: this is a zip file; unpack an .npz first";
    refused(b"PK\x03\x04\0\0\0", zip);
    refused(b"\x93NUMPY\x01", "npy: expected a version after the magic string, got the end of the file");
    let cut = "npy: expected 8 bytes of data for f4 of shape (2,), got 7";
    refused(&npy("<f4", "(2,)", &[0; 7]), cut);
    let negative = "npy: expected dimensions of 0 or more, got `-2`";
    refused(&npy("<f4", "(-2,)", &[0; 8]), negative);
    let object = "npy: expected an array of numbers, got an object array `|O`\n  \
        note: save an array of numbers, as `array.astype('float32')` gives";
    refused(&npy("|O", "(2,)", &[0; 8]), object);
    let huge = "npy: expected a shape that fits into memory, got (9223372036854775807, 9223372036854775807)";
    refused(&npy("<f4", "(9223372036854775807, 9223372036854775807)", &[]), huge);
}

#[test]
fn a_safetensors_file_without_the_tensor() {
    let scratch = scratch();
    let header = r#"{"b":{"dtype":"I8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#;
    scratch.write("w.safetensors", safetensors(header, &[0; 6]));
    scratch.write("bad.safetensors", safetensors("{", &[]));
    let refuses = |file: &str, error: &str| {
        let error = format!("error: @sum: v0: {error}\n");
        scratch.refuses(&format!("exec sum.csr -n 2 --input {file}"), &error);
    };
    refuses("w.safetensors:c", "w.safetensors: no tensor `c`\n  note: it has a, b");
    let dtypes = "F32, F64, F16, BF16, I32, I64, U8 or BOOL";
    refuses("w.safetensors:b", &format!("w.safetensors: `b`: expected {dtypes}, got I8"));
    refuses("w.safetensors:a", "w.safetensors:a: expected f32[2]{tp}, got f32[1]");
    let unnamed = "w.safetensors: expected the name of a tensor after a colon, got none\n  note: it has a, b";
    refuses("w.safetensors", unnamed);
    let json = "invalid JSON in header: EOF while parsing an object at line 1 column 1";
    refuses("bad.safetensors:a", &format!("bad.safetensors: safetensors: {json}"));
}

#[test]
fn a_missing_file() {
    let scratch = scratch();
    let missing = |what: &str| format!("cannot read {what}: No such file or directory (os error 2)\n");
    scratch.refuses("opt none.csr", &format!("error: {}", missing("none.csr")));
    scratch.refuses("exec none.csr -n 2", &format!("error: {}", missing("none.csr")));
    let input = "exec sum.csr -n 2 --input";
    scratch.refuses(&format!("{input} none.npy"), &format!("error: @sum: v0: {}", missing("none.npy")));
    scratch.write("x0.npy", npy_f32(&[1.0, 2.0]));
    scratch.refuses(&format!("{input} x{{rank}}.npy"), &format!("error: @sum: v0: {}", missing("x1.npy")));
    let none = missing("none.safetensors");
    scratch.refuses(&format!("{input} none.safetensors:w"), &format!("error: @sum: v0: {none}"));
    scratch.refuses("opt .", "error: cannot read .: Is a directory (os error 21)\n");
}

#[test]
fn another_number_of_ranks() {
    let error = "error: sum.csr: expected -n 2, the ranks of mesh (tp: 2), got -n 3\n";
    scratch().refuses("exec sum.csr -n 3 --input x.npy", error);
    let scratch = scratch();
    scratch.write("sum.csr", SUM.replace("tp: 2", "tp: 5000"));
    let error = "error: sum.csr: expected at most 4096 ranks, got 5000\n";
    scratch.refuses("exec sum.csr -n 5000 --input x.npy", error);
}

#[test]
fn another_number_of_inputs() {
    let note = "  note: give one --input for each parameter of @sum(v0: f32[2]{tp})\n";
    let error = format!("error: @sum: expected 1 input, got 2\n{note}");
    scratch().refuses("exec sum.csr -n 2 --input x.npy --input x.npy", &error);
    let error = "error: @f: expected 2 inputs, got 1\n  \
        note: give one --input for each parameter of @f(v0: f32[s0], v1: size<s0>)\n";
    scratch().refuses("exec sized.csr -n 1 --func f --input x.npy", error);
    let error = format!("error: sum.csr: expected a `; run:` line or --input, got neither\n{note}");
    scratch().refuses("exec sum.csr -n 2", &error);
}

#[test]
fn values_that_differ_where_they_are_declared_equal() {
    let scratch = scratch();
    scratch.write("sum.csr", SUM.replace("f32[2]{tp}", "f32[2]"));
    scratch.write("x0.npy", npy_f32(&[1.0, 2.0]));
    scratch.write("x1.npy", npy_f32(&[1.0, 3.0]));
    let error = "error[input]: @sum: argument v0: f32[2] is declared equal on ranks 0 and 1, but their values \
        differ\n";
    scratch.refuses("exec sum.csr -n 2 --input x{rank}.npy", error);
}

#[test]
fn no_function_or_none_of_the_name() {
    let error = "error: sized.csr: expected --func with one of @f, @g, got none\n";
    scratch().refuses("exec sized.csr -n 1 --input x.npy", error);
    let error = "error: sized.csr: no function @h\n  note: it has @f, @g\n";
    scratch().refuses("exec sized.csr -n 1 --func h --input x.npy", error);
    let json = scratch().run("exec sized.csr -n 1 --func h --json");
    let expected = "{\"error\":\"sized.csr: no function @h\\n  note: it has @f, @g\",\"func\":\"h\",\"ok\":false,\"ranks\":[]}\n";
    assert_eq!(json.parts(), (1, expected, ""));
}

#[test]
fn outputs_that_cannot_be_written_are_the_machines_failure() {
    let outcome = scratch().run("exec sum.csr -n 2 --input x.npy --output x.npy/out");
    let error = "error: cannot create the folder x.npy/out: Not a directory (os error 20)\n";
    assert_eq!(outcome.parts(), (2, "", error));
}

#[test]
fn outputs_of_run_lines_are_refused() {
    let scratch = scratch();
    scratch.write("sum.csr", format!("{SUM}; run: @sum(1) == 2\n"));
    let error =
        "error: --output: expected --input, got none\n  note: the results of run lines are only printed\n";
    scratch.refuses("exec sum.csr -n 2 --output out", error);
}

#[test]
fn wrong_arguments_are_the_users() {
    for args in
        ["exec sum.csr", "exec sum.csr -n two", "exec sum.csr -n 2 --force", "opt", "bogus", "--bogus"]
    {
        let outcome = scratch().run(args);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (1, ""), "{args}");
        assert!(outcome.stderr.starts_with("error: "), "{args}: {}", outcome.stderr);
    }
}
