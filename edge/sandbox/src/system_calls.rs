//! System calls that a process or thread may still make, by the kernel's seccomp (seccomp(2)).
//!
//! Each list names what is allowed. What it does not name fails with ENOSYS, as on an older kernel, so that C libraries
//! use the older call that they know; nothing is killed. On another architecture than those below, nothing is filtered.
//!
//! | refused | because |
//! |---|---|
//! | fork, and clone but for threads | neither proxy nor agent starts processes |
//! | execve, but for a proxy that begins anew | the same |
//! | memory that is written and run | code comes from files |
//! | sockets of other families than unix, inet, inet6, netlink | raw frames, Bluetooth, vsock, … are not used |
//! | ptrace, process_vm_*, bpf, perf_event_open, userfaultfd, io_uring, keyrings | large parts of the kernel |
//! | mounts, namespaces, modules, clocks, reboot, … | privileged |

use std::collections::BTreeMap;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use crate::sandbox_report::SandboxPart;

/// Whether a process may become another program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramStarts {
    /// The process stays the program that it is.
    Refused,
    /// The process may call execve, on programs that its files allow.
    BecomesAnother,
}

/// Calls that need no condition.
const ALLOWED: &[libc::c_long] = &[
    // Files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_close,
    libc::SYS_close_range,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_mkdirat,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_truncate,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_tee,
    libc::SYS_vmsplice,
    libc::SYS_utimensat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_umask,
    libc::SYS_chdir,
    libc::SYS_fchdir,
    libc::SYS_getcwd,
    libc::SYS_getxattr,
    libc::SYS_fgetxattr,
    libc::SYS_setxattr,
    libc::SYS_fsetxattr,
    libc::SYS_listxattr,
    libc::SYS_flistxattr,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
    libc::SYS_memfd_create,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_msync,
    libc::SYS_mincore,
    libc::SYS_mlock,
    libc::SYS_munlock,
    // Threads and time.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_get_robust_list,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_getpriority,
    libc::SYS_setpriority,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_timer_create,
    libc::SYS_timer_settime,
    libc::SYS_timer_gettime,
    libc::SYS_timer_delete,
    libc::SYS_getitimer,
    libc::SYS_setitimer,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_restart_syscall,
    libc::SYS_wait4,
    libc::SYS_waitid,
    // Events and signals.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_sigaltstack,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    // What the process is.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getgroups,
    libc::SYS_getresuid,
    libc::SYS_getresgid,
    libc::SYS_getpgid,
    libc::SYS_getsid,
    libc::SYS_setsid,
    libc::SYS_getrlimit,
    libc::SYS_setrlimit,
    libc::SYS_prlimit64,
    libc::SYS_getrusage,
    libc::SYS_times,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getrandom,
    libc::SYS_getcpu,
    libc::SYS_prctl,
    libc::SYS_capget,
    // Sockets; `socket` itself has a condition.
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_connect,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_setsockopt,
    libc::SYS_getsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_shutdown,
    // A thread that gives up more (confined_call.rs).
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
];

/// Older names of calls in `ALLOWED`, which newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLDER: &[libc::c_long] = &[
    libc::SYS_open,
    libc::SYS_creat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_access,
    libc::SYS_readlink,
    libc::SYS_getdents,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_dup2,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_signalfd,
    libc::SYS_inotify_init,
    libc::SYS_time,
    libc::SYS_alarm,
    libc::SYS_pause,
    libc::SYS_getpgrp,
    libc::SYS_arch_prctl,
];
#[cfg(target_arch = "aarch64")]
const ALLOWED_OLDER: &[libc::c_long] = &[libc::SYS_renameat];
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const ALLOWED_OLDER: &[libc::c_long] = &[];

/// Calls of a thread that only computes, that need no condition.
const COMPUTING: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // An abort.
    libc::SYS_tgkill,
    libc::SYS_exit_group,
];

/// Families of sockets that are used.
const FAMILIES: [libc::c_int; 4] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
];

/// Namespaces that a thread could be started in.
const NAMESPACES: libc::c_int = libc::CLONE_NEWNS
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// For each call the conditions under which it is allowed: all of a rule, of one rule at least. No rule: always.
type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Restricts this thread, and those that it starts, to what proxy and agent need.
pub(crate) fn restrict_process(starts: ProgramStarts) -> SandboxPart {
    let rules = process_rules(starts).map_err(|error| error.to_string())?;
    apply(&compile(rules)?)
}

/// Restricts this thread to computing, memory, and messages on standard error.
pub(crate) fn restrict_to_computing() -> SandboxPart {
    static PROGRAM: OnceLock<Result<BpfProgram, String>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| {
        let rules = computing_rules().map_err(|error| error.to_string())?;
        compile(rules)
    });
    apply(program.as_ref().map_err(Clone::clone)?)
}

fn process_rules(starts: ProgramStarts) -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = ALLOWED
        .iter()
        .chain(ALLOWED_OLDER)
        .map(|call| (*call, Vec::new()))
        .collect();
    if starts == ProgramStarts::BecomesAnother {
        rules.insert(libc::SYS_execve, Vec::new());
    }
    let families = FAMILIES.map(|family| rule(vec![argument(0, SeccompCmpOp::Eq, family)]));
    rules.insert(
        libc::SYS_socket,
        families.into_iter().collect::<Result<_, _>>()?,
    );
    let thread = vec![
        flags(0, libc::CLONE_THREAD, libc::CLONE_THREAD),
        flags(0, NAMESPACES, 0),
    ];
    rules.insert(libc::SYS_clone, vec![rule(thread)?]);
    // Neither types into the terminal that the process was started from.
    let not_typing = vec![
        argument(1, SeccompCmpOp::Ne, libc::TIOCSTI as libc::c_int),
        argument(1, SeccompCmpOp::Ne, libc::TIOCLINUX as libc::c_int),
    ];
    rules.insert(libc::SYS_ioctl, vec![rule(not_typing)?]);
    insert_memory(&mut rules)?;
    // Libraries are mapped to be run, and not written (`insert_memory` refuses both for threads that compute).
    rules.insert(
        libc::SYS_mmap,
        vec![
            rule(vec![flags(2, libc::PROT_EXEC, 0)])?,
            rule(vec![flags(2, libc::PROT_WRITE, 0)])?,
        ],
    );
    Ok(rules)
}

fn computing_rules() -> Result<Rules, seccompiler::BackendError> {
    let mut rules: Rules = COMPUTING.iter().map(|call| (*call, Vec::new())).collect();
    let to_stderr = || rule(vec![argument(0, SeccompCmpOp::Eq, libc::STDERR_FILENO)]);
    rules.insert(libc::SYS_write, vec![to_stderr()?]);
    rules.insert(libc::SYS_writev, vec![to_stderr()?]);
    insert_memory(&mut rules)?;
    Ok(rules)
}

/// Memory that is never run.
fn insert_memory(rules: &mut Rules) -> Result<(), seccompiler::BackendError> {
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![rule(vec![flags(2, libc::PROT_EXEC, 0)])?]);
    }
    Ok(())
}

type Condition = Result<SeccompCondition, seccompiler::BackendError>;

fn rule(conditions: Vec<Condition>) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(conditions.into_iter().collect::<Result<_, _>>()?)
}

/// Compares an argument of 32 bits.
fn argument(index: u8, compared: SeccompCmpOp, value: libc::c_int) -> Condition {
    let value = u64::from(value.cast_unsigned());
    SeccompCondition::new(index, SeccompCmpArgLen::Dword, compared, value)
}

/// Compares those bits of an argument that are in `mask`.
fn flags(index: u8, mask: libc::c_int, value: libc::c_int) -> Condition {
    let mask = SeccompCmpOp::MaskedEq(u64::from(mask.cast_unsigned()));
    argument(index, mask, value)
}

fn compile(rules: Rules) -> Result<BpfProgram, String> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)
        .map_err(|_| format!("there is no list for {}", std::env::consts::ARCH))?;
    let refused = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture)
        .and_then(TryInto::try_into)
        .map_err(|error| error.to_string())
}

fn apply(program: &BpfProgram) -> SandboxPart {
    apply_filter(program).map_err(|error| match error {
        seccompiler::Error::Prctl(cause) | seccompiler::Error::Seccomp(cause) => cause.to_string(),
        other => other.to_string(),
    })
}
