//! Which of several sockets on one port receives a datagram: a classic BPF program of the kernel.
//!
//! ```text
//!  datagram ─▶ jhash(bytes 1 … 8, seed) × workers / 2³² ─▶ the socket with this index, in the order of binding
//! ```
//!
//! Bytes 1 to 8 of each D2TP packet are a connection id, which a worker issued so that its own index results. A program
//! of this kind (`SO_ATTACH_REUSEPORT_CBPF`, Linux 4.6) needs no privileges.

use std::io;
use std::os::fd::AsRawFd;

use crate::socket::LinkSocket;

/// The offset of the connection id in a packet.
const CID_OFFSET: u32 = 1;
/// The most workers: the program multiplies 16 bits by their number.
pub const WORKERS_MAX: u16 = 256;

/// Words of the program's memory.
const A: u32 = 0;
const B: u32 = 1;
const C: u32 = 2;
const SCRATCH: u32 = 3;

/// Makes the kernel choose among the sockets that share this one's port. They keep the program when another
/// process receives them.
///
/// # Errors
/// The system has no such programs, or the socket shares no port.
pub fn steer_to_workers(socket: &LinkSocket, seed: u32, workers: u16) -> io::Result<()> {
    let mut program = steering_program(seed, workers);
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: pointer and length describe `filter`, and it the program; both live during the call, which copies them.
    let result = unsafe {
        libc::setsockopt(
            std::os::fd::AsFd::as_fd(socket).as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const filter).cast(),
            size_of_val(&filter) as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn instruction(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

/// `jhash` of the Linux kernel (include/linux/jhash.h) for the eight bytes, scaled to the number of workers.
fn steering_program(seed: u32, workers: u16) -> Vec<libc::sock_filter> {
    use libc::{
        BPF_A, BPF_ABS, BPF_ADD, BPF_ALU, BPF_AND, BPF_B, BPF_IMM, BPF_K, BPF_LD, BPF_LDX, BPF_LSH,
        BPF_MEM, BPF_MISC, BPF_MUL, BPF_OR, BPF_RET, BPF_RSH, BPF_ST, BPF_SUB, BPF_TAX, BPF_W,
        BPF_X, BPF_XOR,
    };
    let load = |word| instruction(BPF_LD | BPF_W | BPF_MEM, word);
    let load_x = |word| instruction(BPF_LDX | BPF_W | BPF_MEM, word);
    let store = |word| instruction(BPF_ST, word);
    let to_x = instruction(BPF_MISC | BPF_TAX, 0);
    let by_constant = |operation, k| instruction(BPF_ALU | operation | BPF_K, k);
    let by_x = |operation| instruction(BPF_ALU | operation | BPF_X, 0);
    let start = 0xdead_beef_u32.wrapping_add(8).wrapping_add(seed);
    let mut program = vec![instruction(BPF_LD | BPF_W | BPF_IMM, start), store(C)];
    for (word, offset) in [(A, CID_OFFSET), (B, CID_OFFSET + 4)] {
        // Four bytes, the last one first: little-endian.
        program.push(instruction(BPF_LD | BPF_B | BPF_ABS, offset + 3));
        for byte in (0..3).rev() {
            program.push(by_constant(BPF_LSH, 8));
            program.push(to_x);
            program.push(instruction(BPF_LD | BPF_B | BPF_ABS, offset + byte));
            program.push(by_x(BPF_OR));
        }
        program.push(by_constant(BPF_ADD, start));
        program.push(store(word));
    }
    for (target, other, turn) in [
        (C, B, 14),
        (A, C, 11),
        (B, A, 25),
        (C, B, 16),
        (A, C, 4),
        (B, A, 14),
        (C, B, 24),
    ] {
        // target = (target ^ other) - rotate_left(other, turn)
        program.extend([
            load_x(other),
            load(target),
            by_x(BPF_XOR),
            store(target),
            load(other),
            by_constant(BPF_LSH, turn),
            store(SCRATCH),
            load(other),
            by_constant(BPF_RSH, 32 - turn),
            load_x(SCRATCH),
            by_x(BPF_OR),
            to_x,
            load(target),
            by_x(BPF_SUB),
            store(target),
        ]);
    }
    // c × workers / 2³², in two halves: a word has 32 bits.
    let workers = u32::from(workers);
    program.extend([
        load(C),
        by_constant(BPF_AND, 0xffff),
        by_constant(BPF_MUL, workers),
        by_constant(BPF_RSH, 16),
        store(SCRATCH),
        load(C),
        by_constant(BPF_RSH, 16),
        by_constant(BPF_MUL, workers),
        load_x(SCRATCH),
        by_x(BPF_ADD),
        by_constant(BPF_RSH, 16),
        instruction(BPF_RET | BPF_A, 0),
    ]);
    program
}
