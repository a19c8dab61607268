//! Window clamps that the kernel sets itself, for the sockets of any program: a BPF program that goes through TCP sockets.
//!
//! ```text
//!  cookies and clamps ──▶ map ──▶ iter/tcp: of each socket of this network namespace, is its cookie in the map?
//!                                               └── bpf_setsockopt(TCP_WINDOW_CLAMP)
//! ```
//!
//! No descriptor of another program is used, so it needs no right of a debugger, but CAP_BPF and CAP_PERFMON, Linux
//! 5.15, and the kernel's own types (`/sys/kernel/btf/vmlinux`). docs/decisions/0022-clamps-by-a-tcp-iterator.md says what else was
//! possible.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::sockopt::NO_CLAMP;

/// Where the kernel keeps its types.
const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";
/// The function of the kernel that stands for an iterator over TCP sockets (net/ipv4/tcp_ipv4.c).
const ITERATOR: &str = "bpf_iter_tcp";
/// The most clamps that are set in one go.
const CLAMPS_MAX: usize = 1024;

/// Commands of bpf(2), and constants of its arguments (linux/bpf.h).
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const MAP_DELETE_ELEM: libc::c_long = 3;
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const ITER_CREATE: libc::c_long = 33;
const MAP_TYPE_HASH: u32 = 1;
const PROG_TYPE_TRACING: u32 = 26;
const TRACE_ITER: u32 = 28;
const FUNC_MAP_LOOKUP_ELEM: i32 = 1;
const FUNC_GET_SOCKET_COOKIE: i32 = 46;
const FUNC_SETSOCKOPT: i32 = 49;
const PSEUDO_MAP_FD: u8 = 1;

/// Codes of instructions (linux/bpf_common.h, linux/bpf.h): a class, and what it does with which operands.
const LOAD: u8 = 0x61; // BPF_LDX | BPF_MEM | BPF_W
const LOAD_LONG: u8 = 0x79; // BPF_LDX | BPF_MEM | BPF_DW
const LOAD_IMMEDIATE: u8 = 0x18; // BPF_LD | BPF_IMM | BPF_DW
const STORE: u8 = 0x63; // BPF_STX | BPF_MEM | BPF_W
const STORE_LONG: u8 = 0x7b; // BPF_STX | BPF_MEM | BPF_DW
const COPY: u8 = 0xbf; // BPF_ALU64 | BPF_MOV | BPF_X
const PUT: u8 = 0xb7; // BPF_ALU64 | BPF_MOV | BPF_K
const ADD: u8 = 0x07; // BPF_ALU64 | BPF_ADD | BPF_K
const JUMP_IF_EQUAL: u8 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const CALL: u8 = 0x85; // BPF_JMP | BPF_CALL
const EXIT: u8 = 0x95; // BPF_JMP | BPF_EXIT

/// Sets window clamps of sockets by their cookies.
#[derive(Debug)]
pub(crate) struct KernelClamps {
    map: OwnedFd,
    /// Holds the program, too.
    link: OwnedFd,
}

impl KernelClamps {
    /// Loads the program.
    ///
    /// # Errors
    /// The kernel has no such programs, or this process may not load one.
    pub(crate) fn load() -> io::Result<KernelClamps> {
        let types = std::fs::read(KERNEL_TYPES)?;
        let Some(iterator) = function_id(&types, ITERATOR) else {
            let text = "this kernel has no BPF iterator over TCP sockets";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        };
        drop(types);
        let map = BpfArguments::default()
            .words(&[MAP_TYPE_HASH, 8, 4, CLAMPS_MAX as u32])
            .open(MAP_CREATE)?;
        let code: Vec<u64> = program(map.as_raw_fd())
            .iter()
            .map(|one| one.bits())
            .collect();
        let license = c"Apache-2.0";
        let program = BpfArguments::default()
            .words(&[PROG_TYPE_TRACING, code.len() as u32])
            .pointer(code.as_ptr().cast())
            .pointer(license.as_ptr().cast())
            // No log, and no name.
            .words(&[0; 11])
            .words(&[TRACE_ITER])
            .words(&[0; 9])
            .words(&[iterator])
            .open(PROG_LOAD)?;
        let link = BpfArguments::default()
            .words(&[program.as_raw_fd() as u32, 0, TRACE_ITER, 0])
            .words(&[0; 4])
            .open(LINK_CREATE)?;
        Ok(KernelClamps { map, link })
    }

    /// Sets the clamps of sockets, which are named by their cookies; `None` is no clamp. A socket that is closed, or of another
    /// network namespace than that of the calling thread, is passed over.
    ///
    /// # Errors
    /// The kernel does not run the program.
    pub(crate) fn set(&self, clamps: &[(u64, Option<u64>)]) -> io::Result<()> {
        for some in clamps.chunks(CLAMPS_MAX) {
            for (cookie, limit) in some {
                let clamp = limit.unwrap_or(NO_CLAMP).min(NO_CLAMP) as u32;
                self.element(cookie)
                    .pointer((&raw const clamp).cast())
                    .words(&[0; 2])
                    .call(MAP_UPDATE_ELEM)?;
            }
            let is_set = self.run();
            for (cookie, _) in some {
                self.element(cookie).call(MAP_DELETE_ELEM)?;
            }
            is_set?;
        }
        Ok(())
    }

    /// The arguments that name an element of the map.
    fn element(&self, cookie: &u64) -> BpfArguments {
        BpfArguments::default()
            .words(&[self.map.as_raw_fd() as u32, 0])
            .pointer((&raw const *cookie).cast())
    }

    /// Goes through the sockets of this thread's network namespace.
    fn run(&self) -> io::Result<()> {
        let link = self.link.as_raw_fd() as u32;
        let mut iterator = File::from(
            BpfArguments::default()
                .words(&[link, 0])
                .open(ITER_CREATE)?,
        );
        // The program prints nothing: the end is reached at once, after all sockets.
        iterator.read_to_end(&mut Vec::new())?;
        Ok(())
    }
}

/// The arguments of a command of bpf(2): words in the order of `union bpf_attr`.
#[derive(Debug, Default)]
struct BpfArguments(Vec<u8>);

impl BpfArguments {
    fn words(mut self, words: &[u32]) -> BpfArguments {
        self.0
            .extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        self
    }

    /// Adds a pointer, which must lead to what the command expects there until it has been called.
    fn pointer(mut self, pointer: *const libc::c_void) -> BpfArguments {
        self.0
            .extend((pointer.expose_provenance() as u64).to_ne_bytes());
        self
    }

    fn call(&self, command: libc::c_long) -> io::Result<libc::c_long> {
        // SAFETY: the kernel reads as many bytes as it is told; the pointers in them lead to live values of the caller's.
        let returned =
            unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_ptr(), self.0.len()) };
        match returned {
            0.. => Ok(returned),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Calls a command that returns a new descriptor.
    fn open(&self, command: libc::c_long) -> io::Result<OwnedFd> {
        let descriptor = self.call(command)? as i32;
        // SAFETY: the kernel has just opened it for this process.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

/// An instruction of BPF (`struct bpf_insn`).
#[derive(Clone, Copy, Debug)]
struct BpfInstruction {
    code: u8,
    to: u8,
    from: u8,
    offset: i16,
    immediate: i32,
}

impl BpfInstruction {
    /// The instruction as it lies in memory.
    fn bits(self) -> u64 {
        let registers = match cfg!(target_endian = "little") {
            true => self.from << 4 | self.to,
            false => self.to << 4 | self.from,
        };
        let mut bytes = [self.code, registers, 0, 0, 0, 0, 0, 0];
        bytes[2..4].copy_from_slice(&self.offset.to_ne_bytes());
        bytes[4..].copy_from_slice(&self.immediate.to_ne_bytes());
        u64::from_ne_bytes(bytes)
    }
}

/// The program, for each socket: sets the clamp that the map has for it.
fn program(map: i32) -> Vec<BpfInstruction> {
    /// The frame pointer.
    const FP: u8 = 10;
    let of = |code, to, from, offset, immediate| BpfInstruction {
        code,
        to,
        from,
        offset,
        immediate,
    };
    let memory = |code, to, from, offset| of(code, to, from, offset, 0);
    let copy = |to, from| of(COPY, to, from, 0, 0);
    let put = |to, immediate| of(PUT, to, 0, 0, immediate);
    let add = |to, immediate| of(ADD, to, 0, 0, immediate);
    let call = |function| of(CALL, 0, 0, 0, function);
    // The number of instructions that are jumped over is put in below.
    let end_if_zero = |register| of(JUMP_IF_EQUAL, register, 0, 0, 0);
    let mut program = vec![
        // r7 = ctx->sk_common, which is no socket in the last call (struct bpf_iter__tcp)
        memory(LOAD_LONG, 7, 1, 8),
        end_if_zero(7),
        copy(1, 7),
        call(FUNC_GET_SOCKET_COOKIE),
        memory(STORE_LONG, FP, 0, -8),
        // Two instructions load a map.
        of(LOAD_IMMEDIATE, 1, PSEUDO_MAP_FD, 0, map),
        of(0, 0, 0, 0, 0),
        copy(2, FP),
        add(2, -8),
        call(FUNC_MAP_LOOKUP_ELEM),
        end_if_zero(0),
        // The clamp is copied: the option's value may not lie in a map.
        memory(LOAD, 1, 0, 0),
        memory(STORE, FP, 1, -12),
        copy(1, 7),
        put(2, libc::IPPROTO_TCP),
        put(3, libc::TCP_WINDOW_CLAMP),
        copy(4, FP),
        add(4, -12),
        put(5, 4),
        call(FUNC_SETSOCKOPT),
    ];
    let end = program.len();
    for (at, one) in program.iter_mut().enumerate() {
        if one.code == JUMP_IF_EQUAL {
            one.offset = (end - at - 1) as i16;
        }
    }
    program.extend([put(0, 0), of(EXIT, 0, 0, 0, 0)]);
    program
}

/// Bytes of the head of the kernel's types, and of what each of them begins with (linux/btf.h).
const TYPES_HEAD_BYTES: usize = 24;
const TYPE_BYTES: usize = 12;
const TYPES_MAGIC: u16 = 0xeb9f;
/// The kind of a function.
const KIND_FUNC: u32 = 12;

/// The number of a function among the kernel's types; none if it is not there, or if they cannot be read.
fn function_id(types: &[u8], name: &str) -> Option<u32> {
    let word = |at: usize| {
        let word = types.get(at..at + 4)?;
        Some(u32::from_ne_bytes(word.try_into().ok()?))
    };
    let magic = u16::from_ne_bytes(types.get(..2)?.try_into().ok()?);
    let head = word(4)? as usize;
    if magic != TYPES_MAGIC || head < TYPES_HEAD_BYTES {
        return None;
    }
    let part = |at: usize| {
        let (offset, length) = (word(at)? as usize, word(at + 4)? as usize);
        let start = head.checked_add(offset)?;
        Some(start..start.checked_add(length)?)
    };
    let (listed, names) = (part(8)?, types.get(part(16)?)?);
    let mut at = listed.start;
    let mut id = 0;
    while at < listed.end {
        // Numbers begin at 1.
        id += 1;
        let info = word(at + 4)?;
        let (kind, members) = (info >> 24 & 0x1f, (info & 0xffff) as usize);
        if kind == KIND_FUNC {
            let rest = names.get(word(at)? as usize..)?;
            let is_it = rest.strip_prefix(name.as_bytes());
            if is_it.is_some_and(|rest| rest.first() == Some(&0)) {
                return Some(id);
            }
        }
        at += TYPE_BYTES + bytes_behind(kind, members)?;
    }
    None
}

/// The bytes that follow what each type begins with; none for a kind that is not known.
fn bytes_behind(kind: u32, members: usize) -> Option<usize> {
    Some(match kind {
        // pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags
        2 | 7..=12 | 16 | 18 => 0,
        // integers, variables, declaration tags
        1 | 14 | 17 => 4,
        // arrays
        3 => 12,
        // enumerations, prototypes
        6 | 13 => 8 * members,
        // structs, unions, sections, enumerations of 64 bits
        4 | 5 | 15 | 19 => 12 * members,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockopt::window_clamp;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    /// The option with the cookie of a socket (asm-generic/socket.h).
    const SO_COOKIE: libc::c_int = 57;

    fn cookie(stream: &TcpStream) -> u64 {
        let (mut cookie, mut length) = (0u64, 8);
        // SAFETY: the pointers are to a live integer and its length.
        let failed = unsafe {
            libc::getsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut length,
            )
        };
        assert_eq!(failed, 0);
        cookie
    }

    #[test]
    fn the_kernel_sets_the_clamp_of_the_socket_that_is_named_and_of_no_other() {
        let clamps = match KernelClamps::load() {
            Ok(clamps) => clamps,
            Err(error) => {
                eprintln!("skipped: no BPF program can be loaded here: {error}");
                return;
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (named, other) = (connect(), connect());
        let before = window_clamp(other.as_fd()).unwrap();
        clamps.set(&[(cookie(&named), Some(20_000))]).unwrap();
        assert_eq!(window_clamp(named.as_fd()).unwrap(), 20_000);
        assert_eq!(window_clamp(other.as_fd()).unwrap(), before);
        clamps.set(&[(cookie(&named), None)]).unwrap();
        assert_eq!(u64::from(window_clamp(named.as_fd()).unwrap()), NO_CLAMP);
        // A clamp is set once, and not by each later run.
        clamps.set(&[(cookie(&other), Some(30_000))]).unwrap();
        assert_eq!(u64::from(window_clamp(named.as_fd()).unwrap()), NO_CLAMP);
        clamps.set(&[(u64::MAX, Some(9_000))]).unwrap();
    }

    /// Types of a kernel: an integer, a struct with two members, and functions with these names.
    fn types(functions: &[&str]) -> Vec<u8> {
        let mut names = vec![0];
        let mut listed: Vec<u32> = vec![0, 1 << 24, 4, 32];
        listed.extend([0, 4 << 24 | 2, 8, 0, 0, 0, 0, 0, 0]);
        for function in functions {
            listed.extend([names.len() as u32, KIND_FUNC << 24, 1]);
            names.extend(function.as_bytes());
            names.push(0);
        }
        let listed: Vec<u8> = listed.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let mut types = TYPES_MAGIC.to_ne_bytes().to_vec();
        types.extend([1, 0]);
        let head = [
            24,
            0,
            listed.len() as u32,
            listed.len() as u32,
            names.len() as u32,
        ];
        types.extend(head.iter().flat_map(|word| word.to_ne_bytes()));
        types.extend(listed);
        types.extend(names);
        types
    }

    #[test]
    fn a_function_is_found_among_types_by_its_whole_name() {
        let known = types(&["bpf_iter_tcp_show", "bpf_iter", "bpf_iter_tcp"]);
        assert_eq!(function_id(&known, ITERATOR), Some(5));
        assert_eq!(function_id(&known, "bpf_iter_tc"), None);
        for length in 0..known.len() {
            assert_eq!(
                function_id(&known[..length], ITERATOR),
                None,
                "cut at {length}"
            );
        }
    }
}
