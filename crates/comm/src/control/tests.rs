//! Coordinators and ranks over real sockets, in one process.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};

use super::*;
use crate::job::Job;

const LONG: Duration = Duration::from_secs(20);

/// Runs a job of `n` ranks in threads; the results in rank order.
fn job<T: Send>(n: usize, launched: bool, f: impl Fn(Control, usize, &Coordinator) -> T + Sync) -> Vec<T> {
    let job = Job::random().unwrap();
    let coordinator = Coordinator::start(&job, n, launched).unwrap();
    thread::scope(|scope| {
        let (f, job, coordinator) = (&f, &job, &coordinator);
        let run = |rank| move || f(Control::connect(job, rank, n, LONG).unwrap(), rank, coordinator);
        let ranks: Vec<_> = (0..n).map(|rank| scope.spawn(run(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Waits until `holds` is true.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "never: {what}");
        thread::yield_now();
    }
}

fn stranger(job: &Job) -> UnixStream {
    let address = SocketAddr::from_abstract_name(job.socket()).unwrap();
    UnixStream::connect_addr(&address).unwrap()
}

/// Whether the peer closes without sending anything.
fn is_dropped(mut stream: &UnixStream) -> bool {
    stream.set_read_timeout(Some(LONG)).unwrap();
    match stream.read(&mut [0; 1]) {
        Ok(n) => n == 0,
        // The peer did not read all that was sent.
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_rendezvous_brings_blobs_and_descriptors_to_all() {
    let met = job(5, true, |control, rank, _| {
        // A pipe's end that only this rank has: a peer that receives it can write what only this rank reads.
        let (mut from, to) = std::io::pipe().unwrap();
        let fd = (rank != 2).then(|| to.as_fd());
        let peers = control.rendezvous(&vec![rank as u8; 20_000 * rank / 4], fd, LONG).unwrap();
        drop(to);
        for (peer_rank, peer) in peers.iter().enumerate() {
            assert_eq!((peer.blob.len(), peer.fd.is_some()), (20_000 * peer_rank / 4, peer_rank != 2));
            assert!(peer.blob.iter().all(|byte| usize::from(*byte) == peer_rank));
            assert_eq!(peer.pid, std::process::id());
        }
        for peer in peers {
            if let Some(fd) = peer.fd {
                File::from(fd).write_all(&[rank as u8]).unwrap();
            }
        }
        let mut got = Vec::new();
        from.read_to_end(&mut got).unwrap();
        got.sort();
        got
    });
    let all = vec![0, 1, 2, 3, 4];
    assert_eq!(met, [all.clone(), all.clone(), vec![], all.clone(), all]);
}

#[test]
fn many_meetings_follow_one_another() {
    job(4, true, |control, rank, _| {
        for i in 0..50 {
            control.barrier(&format!("step {i}"), LONG).unwrap();
            control.parity(&[("b", "1"), ("a", "x")], LONG).unwrap();
            let peers = control.rendezvous(&[i, rank as u8], None, LONG).unwrap();
            assert!(peers.iter().enumerate().all(|(rank, peer)| peer.blob == [i, rank as u8]));
        }
    });
}

#[test]
fn a_parity_mismatch_has_the_same_text_on_every_rank_and_stays() {
    let texts = job(4, true, |control, rank, _| {
        let backend = if rank == 1 { "math" } else { "flash" };
        let first = control.parity(&[("threads", "8"), ("backend", backend)], LONG).unwrap_err();
        assert_eq!(control.barrier("later", LONG).unwrap_err(), first);
        first.to_string()
    });
    let expected = "parity: expected equal values on every rank
  backend   ranks 0,2,3   flash
  backend   rank 1        math
  note: start every rank with the same program, options and environment";
    assert_eq!(texts, vec![expected; 4]);
}

#[test]
fn an_abort_reaches_all_with_reason_and_source_line() {
    let line = line!() + 3;
    let texts = job(3, true, |control, rank, _| {
        if rank == 1 {
            control.abort("no memory left");
        }
        let error = control.barrier("a", LONG).unwrap_err();
        assert!(control.failed());
        assert_eq!(control.failure().unwrap().rank, Some(1));
        assert_eq!(control.parity(&[], LONG).unwrap_err().to_string(), error.to_string());
        error.to_string()
    });
    let expected = format!("rank 1 aborted at {}:{line}: no memory left\n", file!());
    assert!(
        texts.iter().all(|text| text.starts_with("barrier \"a\" at ") && text.contains(&expected)),
        "{texts:?}"
    );
}

#[test]
fn a_death_wakes_the_others_with_the_launchers_word() {
    let start = Instant::now();
    let texts = job(3, true, |control, rank, coordinator| {
        control.barrier("warm", LONG).unwrap();
        if rank == 2 {
            shutdown(control.socket(), Shutdown::Both).unwrap();
            coordinator.ended(2, Exit::Signal(9));
            return String::new();
        }
        control.barrier("work", LONG).unwrap_err().to_string()
    });
    assert!(start.elapsed() < LONG / 2, "not at the deadline");
    let expected = ": rank 2 was killed by SIGKILL (signal 9), after barrier \"warm\"\n";
    assert!(
        texts[..2].iter().all(|text| text.starts_with("barrier \"work\" at ") && text.contains(expected)),
        "{texts:?}"
    );
}

#[test]
fn without_a_launcher_a_closed_connection_is_enough() {
    let texts = job(3, false, |control, rank, _| {
        if rank == 0 {
            shutdown(control.socket(), Shutdown::Both).unwrap();
            return String::new();
        }
        eventually("the flag is set without a call", || control.failed());
        control.barrier("work", LONG).unwrap_err().to_string()
    });
    let expected = ": rank 0 closed its connection without a goodbye\n";
    assert!(texts[1..].iter().all(|text| text.contains(expected)), "{texts:?}");
}

#[test]
fn a_goodbye_is_no_failure_until_someone_waits() {
    job(2, true, |control, rank, _| {
        control.barrier("a", LONG).unwrap();
        if rank == 1 {
            control.goodbye();
            assert_eq!(control.barrier("b", LONG), Err(ControlError::Parted));
            return;
        }
        let text = control.barrier("b", LONG).unwrap_err().to_string();
        assert!(text.contains(": rank 1 said goodbye and does not come to barrier \"b\"\n"), "{text}");
    });
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    job(3, true, |control, rank, _| {
        if rank == 1 {
            // It is connected, so it is told too, though it never arrives.
            eventually("the failure is told", || control.failed());
            return;
        }
        let start = Instant::now();
        let text = control.barrier("a", Duration::from_millis(80)).unwrap_err().to_string();
        assert!(text.starts_with("barrier \"a\": the deadline passed; missing: rank 1\n"), "{text}");
        assert!(start.elapsed() < Duration::from_secs(5));
    });
}

#[test]
fn strangers_are_counted_dropped_and_in_nobodys_way() {
    let own = Job::random().unwrap();
    let coordinator = Coordinator::start(&own, 2, true).unwrap();
    let control = Control::connect(&own, 0, 2, LONG).unwrap();
    // Silence, more of it than the lobby holds; garbage; a huge claim; the wrong secret.
    let silent: Vec<UnixStream> = (0..100).map(|_| stranger(&own)).collect();
    let say = |bytes: &[u8]| {
        let mut stream = stranger(&own);
        // It may already be closed when the second half of this is written.
        let _ = stream.write_all(bytes);
        stream
    };
    let mut wrong =
        frame::Message::Hello { protocol: frame::PROTOCOL, rank: 1, size: 2, secret: [0; 16] }.encode(0);
    let talking = [
        say(&[0xff; 4096]),
        say(b"GET / HTTP/1.1\r\n\r\n"),
        say(&[1, 0, 0, 255, 255, 255, 255]),
        say(&wrong),
        say(&frame::Message::Goodbye.encode(0)),
    ];
    assert!(talking.iter().all(is_dropped));
    wrong.truncate(20);
    let half = say(&wrong);
    // A rank is admitted among all of them.
    let other = Control::connect(&own, 1, 2, LONG).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| other.barrier("a", LONG).unwrap());
        control.barrier("a", LONG).unwrap();
    });
    assert!(silent.iter().all(is_dropped) && is_dropped(&half));
    assert_eq!(coordinator.strangers(), 106);
    assert_eq!(coordinator.failure(), None);
}

#[test]
fn another_user_is_a_stranger_even_with_the_secret() {
    let own = Job::random().unwrap();
    let user = rustix::process::geteuid().as_raw();
    let coordinator = Coordinator::start_for(&own, 1, true, user + 1).unwrap();
    let error = Control::connect(&own, 0, 1, Duration::from_millis(100)).unwrap_err().to_string();
    // The last attempt may end with a closed connection or with the time.
    let expected = "init: expected a welcome from the coordinator within 100ms, got ";
    assert!(error.starts_with(expected), "{error}");
    assert!(coordinator.strangers() > 0);
}

#[test]
fn claims_that_cannot_be_are_refused_with_a_reason() {
    let own = Job::random().unwrap();
    let _coordinator = Coordinator::start(&own, 2, true).unwrap();
    let _first = Control::connect(&own, 1, 2, LONG).unwrap();
    let text = |rank, size| Control::connect(&own, rank, size, LONG).unwrap_err().to_string();
    let claimed =
        format!("refuses this rank: rank 1 was already claimed by process {}\n", std::process::id());
    assert!(text(1, 2).contains(&claimed));
    assert!(text(2, 2).contains("expected a rank below 2, got 2\n"));
    assert!(text(0, 3).contains("expected a world of 2 ranks, got 3\n"));
}

#[test]
fn a_coordinator_that_is_gone_ends_every_call() {
    let own = Job::random().unwrap();
    let text = Control::connect(&own, 0, 1, Duration::from_millis(30)).unwrap_err().to_string();
    assert!(text.contains("within 30ms, got no coordinator\n"), "{text}");

    let mut coordinator = Coordinator::start(&own, 2, false).unwrap();
    let control = Control::connect(&own, 1, 2, LONG).unwrap();
    coordinator.stop();
    let text = control.barrier("a", LONG).unwrap_err().to_string();
    assert!(text.contains(": rank 0 said goodbye and does not come to barrier \"a\""), "{text}");
    assert!(!control.failed(), "its end in good order is no failure");
}

#[test]
fn a_coordinator_that_ends_still_delivers_what_slow_ranks_have_not_read() {
    let own = Job::random().unwrap();
    let n = 8;
    let mut coordinator = Coordinator::start(&own, n, false).unwrap();
    let secret = own.secret.bytes();
    let come = |rank| {
        let mut stream = stranger(&own);
        stream.set_read_timeout(Some(LONG)).unwrap();
        let hello = frame::Message::Hello { protocol: frame::PROTOCOL, rank, size: n as u32, secret };
        // Together they are more than a socket holds.
        let (name, site, blob) = ("a".to_string(), String::new(), vec![7; MAX_BLOB]);
        let meet = frame::Message::Meet { name, site, milliseconds: 20_000, blob };
        stream.write_all(&[hello.encode(0), meet.encode(0)].concat()).unwrap();
        stream
    };
    let mut ranks: Vec<UnixStream> = (0..n as u32).map(come).collect();
    // The first messages of a connection.
    let read_all = |stream: &mut UnixStream, enough: usize| {
        let (mut inbox, mut bytes, mut kinds) = (frame::Inbox::default(), [0; 65536], Vec::new());
        while kinds.len() < enough {
            match stream.read(&mut bytes).unwrap() {
                0 => break,
                count => inbox.bytes.extend(&bytes[..count]),
            }
            while let Some((message, _)) = inbox.next(frame::Reader::Rank(n)).unwrap() {
                kinds.push(match message {
                    frame::Message::Welcome { .. } => "welcome",
                    frame::Message::Met { .. } => "met",
                    frame::Message::Closing => "closing",
                    _ => "other",
                });
            }
        }
        kinds
    };
    // A rank that has everything continues, and may be the one that ends the coordinator.
    assert_eq!(read_all(&mut ranks[0], 2), ["welcome", "met"]);
    thread::scope(|scope| {
        scope.spawn(|| coordinator.stop());
        for rank in &mut ranks[1..] {
            assert_eq!(read_all(rank, 3), ["welcome", "met", "closing"]);
        }
    });
}

#[test]
fn what_is_too_long_is_an_error_here_and_harms_nobody() {
    job(1, true, |control, _, _| {
        let text = control.rendezvous(&vec![0; MAX_BLOB + 1], None, LONG).unwrap_err().to_string();
        assert!(
            text.starts_with("rendezvous: its data: expected at most 65536 bytes, got 65537\n"),
            "{text}"
        );
        let text = control.barrier(&"x".repeat(247), LONG).unwrap_err().to_string();
        assert!(text.starts_with("barrier: its name: expected at most 256 bytes, got 257\n"), "{text}");
        control.barrier(&"x".repeat(246), LONG).unwrap();
        assert_eq!(control.rendezvous(&vec![0; MAX_BLOB], None, LONG).unwrap()[0].blob.len(), MAX_BLOB);
        control.abort(&"é".repeat(5000));
        assert!(control.barrier("a", LONG).unwrap_err().to_string().contains("ééé"));
    });
}

#[test]
fn heaps_are_kept_for_the_last_groups_and_no_longer_than_the_job() {
    let ends = job(2, true, |control, rank, coordinator| {
        // A pipe in place of a heap: its reader sees when the last holder closes it.
        let mut readers = Vec::new();
        for _ in 0..6 {
            let (reader, writer) = std::io::pipe().unwrap();
            let peers = control.share_heap(&[], writer.as_fd(), LONG).unwrap();
            assert!(peers.iter().all(|peer| peer.fd.is_some()));
            readers.push(reader);
        }
        control.barrier("all are kept", LONG).unwrap();
        if rank == 0 {
            let flight = coordinator.flight_record();
            assert!(flight.is_empty() && flight.lost.values().all(Option::is_none), "{flight:?}");
        }
        // The first two are closed already; otherwise this would block forever.
        let rest = readers.split_off(2);
        readers.into_iter().for_each(|mut reader| assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0));
        rest
    });
    ends.into_iter().flatten().for_each(|mut reader| assert_eq!(reader.read(&mut [0; 1]).unwrap(), 0));
}

#[test]
fn the_recorder_of_a_heap_that_was_shared_is_read_without_its_owner() {
    use crate::event::EventKind;
    use crate::recorder::{Recorder, SIZE};
    use crate::shm::segment::Segment;

    job(2, false, |control, rank, coordinator| {
        let (segment, fd) = Segment::shared(SIZE).unwrap();
        let recorder = Recorder::new(segment.into(), "world");
        recorder.record(EventKind::Compile, recorder.name(&format!("program {rank}")), 0);
        control.share_heap(&[], fd.as_fd(), LONG).unwrap();
        drop((recorder, fd));
        control.barrier("nobody has it mapped", LONG).unwrap();
        let flight = coordinator.flight_record();
        let mut ops: Vec<&str> = flight.events.iter().map(|event| event.op.as_str()).collect();
        ops.sort();
        assert_eq!(ops, ["program 0", "program 1"]);
        control.barrier("both have looked", LONG).unwrap();
    });
}
