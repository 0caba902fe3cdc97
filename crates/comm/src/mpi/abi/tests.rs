//! The tables against programs that each library's own compiler made.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use super::*;

/// A C program that prints each constant as a number; a handle of Open MPI as whether it is the address of its symbol.
fn program(abi: Abi) -> String {
    let mut text =
        String::from("#include <mpi.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n");
    for (name, symbol) in Handles::NAMES {
        let value = match abi {
            Abi::OpenMpi => format!("(void *){name} == (void *)&{symbol}"),
            _ => format!("(size_t){name}"),
        };
        writeln!(text, "printf(\"%lld\\n\", (long long)({value}));").unwrap();
    }
    for value in [
        "(ptrdiff_t)MPI_IN_PLACE",
        "MPI_ANY_SOURCE",
        "MPI_ANY_TAG",
        "MPI_COMM_TYPE_SHARED",
        "MPI_TAG_UB",
        "MPI_THREAD_SERIALIZED",
        "MPI_ERR_TRUNCATE",
        "offsetof(MPI_Status, MPI_SOURCE) / 4",
        "offsetof(MPI_Status, MPI_TAG) / 4",
        "sizeof(MPI_Status) <= 32",
    ] {
        writeln!(text, "printf(\"%lld\\n\", (long long)({value}));").unwrap();
    }
    text + "return 0;\n}\n"
}

/// What the table says, in the order of the program.
fn table(abi: Abi) -> Vec<i64> {
    let handles = Handles::new(abi, |_| Ok::<_, ()>(1)).unwrap();
    let n = Numbers::new(abi);
    let numbers =
        [n.any_source, n.any_tag, n.comm_type_shared, n.tag_ub, n.thread_serialized, n.err_truncate];
    let words = [n.status_source, n.status_tag, usize::from(STATUS * 4 == 32)];
    let handles = handles.all().into_iter().map(|handle| handle as i64).chain([n.in_place as i64]);
    handles.chain(numbers.map(i64::from)).chain(words.map(|words| words as i64)).collect()
}

#[test]
fn the_tables_are_those_of_the_headers() {
    let folder = std::env::temp_dir().join(format!("consort-abi-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let mut skipped = Vec::new();
    for (abi, compiler) in
        [(Abi::OpenMpi, "mpicc.openmpi"), (Abi::Mpich, "mpicc.mpich"), (Abi::Standard, "mpicc_abi")]
    {
        let (source, out) = (folder.join(format!("{compiler}.c")), folder.join(compiler));
        fs::write(&source, program(abi)).unwrap();
        let Ok(compiled) = Command::new(compiler).arg(&source).arg("-o").arg(&out).output() else {
            skipped.push(compiler);
            continue;
        };
        assert!(compiled.status.success(), "{compiler}: {}", String::from_utf8_lossy(&compiled.stderr));
        let ran = Command::new(&out).output().unwrap();
        let got: Vec<i64> =
            String::from_utf8_lossy(&ran.stdout).lines().map(|line| line.parse().unwrap()).collect();
        let want = table(abi);
        assert_eq!(got.len(), want.len(), "{compiler}");
        let names = Handles::NAMES.iter().map(|(name, _)| *name).chain(std::iter::repeat("a number"));
        for ((name, got), want) in names.zip(got).zip(want) {
            assert_eq!(got, want, "{compiler}: {name}");
        }
    }
    fs::remove_dir_all(&folder).unwrap();
    println!("{} of 3 skipped: {}", skipped.len(), skipped.join(", "));
}
