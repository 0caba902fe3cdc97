//! Operations of more bytes than a count of MPI has bits for, checked at their ends and around the edges of the pieces.

use std::time::{Duration, Instant};

use consort_comm::{Buffer, Group, Message, World};
use consort_types::{Dtype, Reduce};

const GIB: usize = 1 << 30;
/// More than 31 bits.
const LEN: usize = 2 * GIB + 7;

fn until() -> Instant {
    Instant::now() + Duration::from_secs(250)
}

/// The byte at `i` of what a rank brings.
fn value(i: usize, rank: usize) -> u8 {
    (i >> 20) as u8 ^ i as u8 ^ (rank as u8 * 57 + 1)
}

fn operand(group: &Group, len: usize) -> Buffer {
    let mut buffer = group.heap().alloc(len).unwrap();
    let mut bytes = buffer.bytes_mut(until()).unwrap();
    for (mib, bytes) in bytes.chunks_mut(1 << 20).enumerate() {
        let line: Vec<u8> = (0..256).map(|i| value(mib << 20 | i, group.rank())).collect();
        bytes.chunks_mut(256).for_each(|bytes| bytes.copy_from_slice(&line[..bytes.len()]));
    }
    drop(bytes);
    buffer
}

/// Ends, and edges of pieces.
fn places(len: usize) -> impl Iterator<Item = usize> {
    let edges = (1..=len / GIB).flat_map(|piece| [piece * GIB - 1, piece * GIB]);
    [0, 1, len / 2, len - 1].into_iter().chain(edges).filter(move |place| *place < len)
}

/// Whether a buffer has from `at` on what `rank` brings from `from` on.
fn check(buffer: &Buffer, at: usize, (rank, from): (usize, usize), len: usize) {
    let bytes = buffer.bytes().unwrap();
    for place in places(len) {
        assert_eq!(bytes[at + place], value(from + place, rank), "{at} {place} of rank {rank}");
    }
}

/// Two ranks, one operation after another, since the heap has room for one.
pub(crate) fn large(world: &World) {
    let (n, rank) = (world.size(), world.rank());
    assert_eq!(n, 2);
    let (group, other) = (world.group(5 << 30, Duration::from_secs(250)).unwrap(), 1 - rank);
    let room = |len: usize| group.heap().alloc(len).unwrap();
    let half = GIB + 9;

    let got = group.all_reduce(operand(&group, LEN), Dtype::U8, Reduce::Xor).unwrap().wait(until()).unwrap();
    for place in places(LEN) {
        assert_eq!(got[0].bytes().unwrap()[place], value(place, 0) ^ value(place, 1), "{place}");
    }
    drop(got);
    let got = group.reduce(operand(&group, LEN), Dtype::U8, Reduce::Xor, 1).unwrap().wait(until()).unwrap();
    for place in places(LEN) {
        let want = if rank == 1 { value(place, 0) ^ value(place, 1) } else { value(place, 0) };
        assert_eq!(got[0].bytes().unwrap()[place], want, "{place}");
    }
    drop(got);
    let got = group.broadcast(operand(&group, LEN), 1).unwrap().wait(until()).unwrap();
    check(&got[0], 0, (1, 0), LEN);
    drop(got);
    let got = group.all_gather(operand(&group, half), room(2 * half), 1).unwrap().wait(until()).unwrap();
    (0..n).for_each(|of| check(&got[1], of * half, (of, 0), half));
    drop(got);
    let pending =
        group.reduce_scatter(operand(&group, 2 * half), room(half), Dtype::U8, Reduce::Xor, 1).unwrap();
    let got = pending.wait(until()).unwrap();
    for place in places(half) {
        let at = rank * half + place;
        assert_eq!(got[1].bytes().unwrap()[place], value(at, 0) ^ value(at, 1), "{place}");
    }
    drop(got);
    let (operands, results) = (operand(&group, 2 * half), room(2 * half));
    let got = group.all_to_all(operands, results, &[half; 2], &[half; 2]).unwrap().wait(until()).unwrap();
    (0..n).for_each(|of| check(&got[1], of * half, (of, rank * half), half));
    drop(got);
    let result = (rank == 1).then(|| room(2 * half));
    let got = group.gather(operand(&group, half), result, 1, 1).unwrap().wait(until()).unwrap();
    got.get(1).into_iter().for_each(|got| (0..n).for_each(|of| check(got, of * half, (of, 0), half)));
    drop(got);
    let whole = (rank == 1).then(|| operand(&group, 2 * half));
    let got = group.scatter(whole, room(half), 1, 1).unwrap().wait(until()).unwrap();
    check(&got[rank], 0, (1, rank * half), half);
    drop(got);
    let message = |buffer| Message::new(other, 3, buffer);
    let pending = match rank {
        0 => group.send(message(operand(&group, LEN))),
        _ => group.recv(message(room(LEN))),
    };
    let got = pending.unwrap().wait(until()).unwrap();
    check(&got[0], 0, (0, 0), LEN);
    println!("all large operations");
}
