//! Processes that are not ranks connect to a job's socket.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use super::job::{Job, LONG, ranks};

/// A correct hello of rank 1 except for the secret: kind 1, no descriptors, 25 bytes; version, rank, size, secret.
fn hello() -> Vec<u8> {
    [&[1, 0, 0, 25, 0, 0, 0][..], &[2], &[1, 0, 0, 0], &[3, 0, 0, 0], &[0; 16]].concat()
}

#[test]
fn a_flood_of_strangers_does_not_disturb_a_job() {
    let done = std::env::temp_dir().join(format!("consort-run-{}.done", std::process::id()));
    let mut command = ranks(3, "flooded");
    command.env("FLOOD_DONE", &done);
    let job = Job::start(command);
    let name = job.line_with("job ").rsplit(' ').next().unwrap().to_string();
    let address = SocketAddr::from_abstract_name(format!("consort-{name}")).unwrap();
    let knock = |bytes: &[u8]| {
        let mut stream = UnixStream::connect_addr(&address).unwrap();
        let _ = stream.write_all(bytes);
        stream
    };
    let mut held = Vec::new();
    for i in 0..400 {
        held.push(knock(match i % 4 {
            0 => b"",
            1 => b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            2 => &[1, 0, 0, 25, 0, 0],
            _ => &[0xff; 8192],
        }));
    }
    held.push(knock(&hello()));
    // Each is dropped without an answer.
    for stream in &mut held {
        stream.set_read_timeout(Some(LONG)).unwrap();
        let got = stream.read(&mut [0; 16]);
        let closed =
            got.as_ref().map_or_else(|e| e.kind() == std::io::ErrorKind::ConnectionReset, |n| *n == 0);
        assert!(closed, "{got:?}");
    }
    std::fs::write(&done, "").unwrap();
    let ended = job.end();
    std::fs::remove_file(&done).unwrap();
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(ended.err, "note: 401 connections to the job's socket were turned away\n");
    let rounds: Vec<&str> = (0..3).map(|rank| ended.after(rank, "rounds ")).collect();
    assert!(rounds.iter().all(|n| *n == rounds[0]), "{rounds:?}");
}
