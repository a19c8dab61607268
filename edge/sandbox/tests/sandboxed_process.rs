//! A process in its sandbox, and a thread in its own. This program starts itself again: each test has a process that is
//! then restricted, so that the others are not.

use std::fs;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use cedos_sandbox::{
    CapabilitySet, FileAccess, ProcessSandbox, ProgramStarts, check_file_restriction, confined,
};

/// The variable that names the folder a restricted process may write.
const FOLDER: &str = "CEDOS_SANDBOX_TEST_FOLDER";

/// Runs the test `name` again in a process of its own, whose `FOLDER` is a fresh one.
fn in_its_own_process(name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "{stdout}{stderr}");
}

/// The folder of this process, if it is one that is to be restricted.
fn folder() -> Option<std::path::PathBuf> {
    std::env::var_os(FOLDER).map(Into::into)
}

/// Restricts this process to one folder. Returns whether all parts of the sandbox hold here.
fn enter(folder: &Path, starts: ProgramStarts) -> bool {
    let mut files = FileAccess::default();
    files.write(folder);
    let sandbox = ProcessSandbox {
        files,
        starts,
        capabilities: CapabilitySet::empty(),
    };
    let report = sandbox.enter();
    if let Err(reason) = check_file_restriction() {
        eprintln!("skipped: {reason}");
        return false;
    }
    assert!(report.is_whole(), "{report}");
    true
}

#[test]
fn a_restricted_process_reads_no_other_file_and_writes_its_own() {
    let Some(folder) = folder() else {
        return in_its_own_process("a_restricted_process_reads_no_other_file_and_writes_its_own");
    };
    fs::read("/etc/passwd").expect("it can be read before");
    if !enter(&folder, ProgramStarts::Refused) {
        return;
    }
    for refused in ["/etc/shadow", "/etc/passwd", "/root/.ssh/id_ed25519"] {
        let error = fs::read(refused).expect_err(refused);
        let kinds = [ErrorKind::PermissionDenied, ErrorKind::NotFound];
        assert!(kinds.contains(&error.kind()), "{refused}: {error}");
    }
    let error = fs::read("/etc/passwd").expect_err("it is outside");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    let error = fs::write("/tmp/cedos-sandbox-test", "x").expect_err("it is outside");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    let own = folder.join("own");
    fs::write(&own, "x").expect("its own folder");
    fs::rename(&own, folder.join("renamed")).expect("its own folder");
    assert_eq!(fs::read(folder.join("renamed")).unwrap(), b"x");
}

#[test]
fn a_restricted_process_runs_no_shell() {
    let Some(folder) = folder() else {
        return in_its_own_process("a_restricted_process_runs_no_shell");
    };
    if !enter(&folder, ProgramStarts::Refused) {
        return;
    }
    Command::new("/bin/sh")
        .spawn()
        .expect_err("it starts no process");
    let error = Command::new("/bin/sh").exec();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "{error}");
}

#[test]
fn a_process_that_may_become_another_becomes_none_without_a_rule() {
    let Some(folder) = folder() else {
        return in_its_own_process("a_process_that_may_become_another_becomes_none_without_a_rule");
    };
    if !enter(&folder, ProgramStarts::BecomesAnother) {
        return;
    }
    let error = Command::new("/bin/sh").exec();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    // A program that it has written itself cannot be run either.
    let own = folder.join("program");
    fs::write(&own, "#!/bin/sh\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&own, mode).unwrap();
    let error = Command::new(&own).exec();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
}

#[test]
fn a_restricted_process_has_threads_and_sockets_and_no_raw_ones() {
    let Some(folder) = folder() else {
        return in_its_own_process("a_restricted_process_has_threads_and_sockets_and_no_raw_ones");
    };
    if !enter(&folder, ProgramStarts::Refused) {
        return;
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connecting = std::thread::spawn(move || TcpStream::connect(address));
    listener.accept().unwrap();
    connecting.join().unwrap().unwrap();
    // SAFETY: the call takes numbers only, and returns a descriptor or an error.
    let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0) };
    assert_eq!(raw, -1);
    assert_eq!(
        std::io::Error::last_os_error().raw_os_error(),
        Some(libc::ENOSYS)
    );
    // SAFETY: a mapping of its own, at no given address.
    let mapped = unsafe {
        let written_and_run = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(std::ptr::null_mut(), 4096, written_and_run, flags, -1, 0)
    };
    assert_eq!(mapped, libc::MAP_FAILED);
}

#[test]
fn a_restricted_process_has_no_capabilities() {
    let Some(folder) = folder() else {
        return in_its_own_process("a_restricted_process_has_no_capabilities");
    };
    if !enter(&folder, ProgramStarts::Refused) {
        return;
    }
    let left = rustix::thread::capabilities(None).unwrap();
    assert_eq!(left.effective, CapabilitySet::empty());
    assert_eq!(left.permitted, CapabilitySet::empty());
}

#[test]
fn a_confined_call_computes_and_reaches_nothing() {
    let Some(_) = folder() else {
        return in_its_own_process("a_confined_call_computes_and_reaches_nothing");
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let open = fs::File::open("/etc/passwd").unwrap();
    let bytes: Vec<u32> = (0..1_000_000).collect();
    let sum = confined(|| {
        fs::read("/etc/passwd").expect_err("no file");
        std::io::read_to_string(&open).expect_err("none that is open");
        TcpStream::connect(address).expect_err("no network");
        Command::new("/bin/true").spawn().expect_err("no program");
        let doubled: Vec<u64> = bytes.iter().map(|byte| u64::from(*byte) * 2).collect();
        doubled.iter().sum::<u64>()
    });
    assert_eq!(sum, 999_999_000_000);
    // The thread that called is what it was.
    fs::read("/etc/passwd").unwrap();
}

#[test]
fn a_confined_call_in_a_restricted_process_works() {
    let Some(folder) = folder() else {
        return in_its_own_process("a_confined_call_in_a_restricted_process_works");
    };
    enter(&folder, ProgramStarts::Refused);
    let inside = folder.join("inside");
    fs::write(&inside, "x").unwrap();
    assert!(confined(|| fs::read(&inside)).is_err() || cfg!(not(target_os = "linux")));
    assert_eq!(fs::read(&inside).unwrap(), b"x");
}

#[test]
fn a_panic_of_a_confined_call_reaches_the_caller() {
    let caught = std::panic::catch_unwind(|| confined(|| panic!("a parser's mistake")));
    let text = caught.unwrap_err();
    assert_eq!(text.downcast_ref(), Some(&"a parser's mistake"));
}
