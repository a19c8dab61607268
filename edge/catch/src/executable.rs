//! The kind of a program file, which decides how its connections can be caught.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use object::{Object, ObjectKind, ObjectSection, ReadCache};

/// The most nested interpreters (execve(2) has the same limit).
const INTERPRETERS_MAX: usize = 5;

/// The most bytes of a script's first line (execve(2)).
const FIRST_LINE_BYTES_MAX: u64 = 256;

/// How a program makes system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecutableKind {
    /// The program is linked to a C library that is loaded at start, so that a preloaded library is
    /// called first.
    Dynamic,
    /// Directly, with Go's own resolver.
    Go,
    /// Directly, as a static program.
    Static,
    /// The program runs with more privileges than its user has, so no library may be preloaded.
    Privileged,
}

/// A program that can be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executable {
    /// The file that was found.
    pub path: PathBuf,
    /// The file that is executed: the interpreter of a script.
    pub runs: PathBuf,
    /// The kind of the file that is executed.
    pub kind: ExecutableKind,
}

impl Executable {
    /// Finds the file for a name, as a shell does.
    ///
    /// # Errors
    /// There is no such file, or it cannot be executed; the message says which.
    pub fn find(name: &OsStr) -> io::Result<Executable> {
        let path = locate(name)?;
        let mut runs = path.clone();
        for _ in 0..INTERPRETERS_MAX {
            match interpreter(&runs).map_err(|error| about(&runs, &path, &error))? {
                Some(next) => runs = next,
                None => {
                    let kind = kind_of(&runs).map_err(|error| about(&runs, &path, &error))?;
                    return Ok(Executable { path, runs, kind });
                }
            }
        }
        let text = format!("{}: its interpreters have no end", path.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    /// The name of the executed file, without its folder.
    pub fn name(&self) -> String {
        let name = self.runs.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// The path as execve(2) takes it.
    pub(crate) fn c_path(&self) -> io::Result<CString> {
        Ok(CString::new(self.path.as_os_str().as_bytes())?)
    }
}

/// The error, with the file that it is about.
fn about(runs: &Path, path: &Path, error: &io::Error) -> io::Error {
    let runs = runs.display();
    let text = match path.display() {
        path if path.to_string() == runs.to_string() => format!("{runs}: {error}"),
        path => format!("{runs}, the interpreter of {path}: {error}"),
    };
    io::Error::new(error.kind(), text)
}

fn locate(name: &OsStr) -> io::Result<PathBuf> {
    let shown = name.to_string_lossy();
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        let may_run = std::fs::metadata(&path).map(|m| m.is_file() && m.mode() & 0o111 != 0);
        return match may_run {
            Ok(true) => Ok(path),
            Ok(false) => Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                format!("{shown} is not a program: it is not executable"),
            )),
            Err(error) => Err(io::Error::new(error.kind(), format!("{shown}: {error}"))),
        };
    }
    let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
    let found = std::env::split_paths(&folders)
        .map(|folder| folder.join(name))
        .find(|path| std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.mode() & 0o111 != 0));
    found.ok_or_else(|| {
        let text = format!("{shown} not found. Is it installed, and in PATH?");
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

fn interpreter(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut head = Vec::new();
    let read = File::open(path).and_then(|f| f.take(FIRST_LINE_BYTES_MAX).read_to_end(&mut head));
    if let Err(error) = read {
        // An executable that cannot be read: its kind is unknown.
        return match error.kind() {
            io::ErrorKind::PermissionDenied => Ok(None),
            _ => Err(error),
        };
    }
    let Some(line) = head.strip_prefix(b"#!") else {
        return Ok(None);
    };
    let line = line.split(|b| *b == b'\n').next().unwrap_or_default();
    let mut words = line
        .split(|b| matches!(b, b' ' | b'\t'))
        .filter(|word| !word.is_empty());
    let Some(first) = words.next() else {
        return Ok(None);
    };
    let first = PathBuf::from(OsStr::from_bytes(first));
    // `#!/usr/bin/env NAME` runs NAME.
    if first.file_name() == Some(OsStr::new("env")) {
        let name = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='));
        if let Some(name) = name {
            return locate(OsStr::from_bytes(name)).map(Some);
        }
    }
    Ok(Some(first))
}

fn kind_of(path: &Path) -> io::Result<ExecutableKind> {
    let metadata = std::fs::metadata(path)?;
    let not_root = !nix::unistd::geteuid().is_root();
    if not_root && (metadata.permissions().mode() & 0o6000 != 0 || has_capabilities(path)) {
        return Ok(ExecutableKind::Privileged);
    }
    let file = match File::open(path) {
        Ok(file) => file,
        // What cannot be read cannot be inspected while it runs either.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(ExecutableKind::Privileged);
        }
        Err(error) => return Err(error),
    };
    let cache = ReadCache::new(file);
    let Ok(elf) = object::File::parse(&cache) else {
        let text = format!("{} is neither a program nor a script", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    };
    let has = |name: &str| elf.section_by_name(name).is_some();
    // The Go linker writes these sections, and `-s -w` keeps them.
    if has(".go.buildinfo") || has(".note.go.buildid") {
        return Ok(ExecutableKind::Go);
    }
    let loads = elf.sections().any(|s| s.name() == Ok(".interp"));
    let is_program = matches!(elf.kind(), ObjectKind::Executable | ObjectKind::Dynamic);
    Ok(match loads && is_program {
        true => ExecutableKind::Dynamic,
        false => ExecutableKind::Static,
    })
}

/// Whether the file has capabilities (capabilities(7)).
fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: both are terminated strings; with size 0 nothing is written.
    unsafe {
        libc::getxattr(
            path.as_ptr(),
            c"security.capability".as_ptr(),
            std::ptr::null_mut(),
            0,
        ) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_loads_a_c_library_is_dynamic_and_scripts_are_their_interpreters() {
        let found = Executable::find(OsStr::new("sh")).unwrap();
        assert_eq!(found.kind, ExecutableKind::Dynamic);
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "#!/usr/bin/env -S sh -e\necho\n").unwrap();
        let without = Executable::find(script.as_os_str()).unwrap_err();
        assert!(without.to_string().contains("not executable"));
        std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
        let run = Executable::find(script.as_os_str()).unwrap();
        assert_eq!(
            (run.path, run.runs, run.kind),
            (script, found.runs, found.kind)
        );
        let orphan = folder.path().join("orphan");
        std::fs::write(&orphan, "#!/no/such/interpreter\n").unwrap();
        std::fs::set_permissions(&orphan, PermissionsExt::from_mode(0o755)).unwrap();
        let text = Executable::find(orphan.as_os_str())
            .unwrap_err()
            .to_string();
        assert!(text.contains("/no/such/interpreter, the interpreter of"));
        let none = Executable::find(OsStr::new("no-such-program")).unwrap_err();
        assert!(none.to_string().contains("PATH"), "{none}");
    }
}
