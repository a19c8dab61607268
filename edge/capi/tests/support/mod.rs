//! Helpers that compile and run C programs with the library.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

/// All warnings are errors.
const WARNINGS: [&str; 4] = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-missing-field-initializers",
];

/// The crate's folder, also for tests of other crates.
pub fn here() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../edge/capi"))
}

/// The path of the library, where the build put it.
pub fn library() -> PathBuf {
    built_library("libd2tp.so")
}

/// The path of a library that the build put beside this test, or above.
pub fn built_library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let deps = test.parent().expect("it lies in a folder");
    let found = [deps, deps.parent().expect("as the folder does")]
        .map(|folder| folder.join(name))
        .into_iter()
        .find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{name} is built with this test"))
}

/// A compiled program, with its own folder.
pub struct CProgram {
    pub folder: TempDir,
    name: String,
}

impl CProgram {
    /// Compiles a program for the kernel's sockets.
    pub fn plain(source: &str) -> CProgram {
        CProgram::compile(source, &[]).expect("a C compiler, and a program that it takes")
    }

    /// Compiles a program with the library.
    pub fn with_d2tp(source: &str) -> CProgram {
        CProgram::with_flags(source, &[]).expect("a C compiler, and a program that it takes")
    }

    /// Compiles a program with the library and these flags. Returns the compiler's error if it
    /// refuses them.
    pub fn with_flags(source: &str, flags: &[&str]) -> Result<CProgram, String> {
        let include = here().join("include");
        let mut all = vec![
            "-DWITH_D2TP",
            "-I",
            include.to_str().expect("a path in UTF-8"),
        ];
        all.extend(flags);
        CProgram::compile(source, &all)
    }

    fn compile(source: &str, flags: &[&str]) -> Result<CProgram, String> {
        let folder = TempDir::new().expect("a place for it");
        let name = source.trim_end_matches(".c").to_owned();
        let mut compiler = Command::new("cc");
        compiler
            .args(WARNINGS)
            .args(["-g", "-O1", "-o"])
            .arg(folder.path().join(&name))
            .arg(here().join("tests/c").join(source))
            .args(flags);
        if flags.contains(&"-DWITH_D2TP") {
            let linked = folder.path().join("libd2tp.so.1");
            std::os::unix::fs::symlink(library(), &linked).expect("a link in our folder");
            compiler.arg(&linked);
        }
        compiler.arg("-lpthread");
        let built = compiler.output().map_err(|error| error.to_string())?;
        match built.status.success() {
            true => Ok(CProgram { folder, name }),
            false => Err(String::from_utf8_lossy(&built.stderr).into_owned()),
        }
    }

    /// A command for the program, with its own device key.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.folder.path().join(&self.name));
        command
            .env("LD_LIBRARY_PATH", self.folder.path())
            .env("XDG_CONFIG_HOME", self.folder.path())
            .env("CEDOS_AGENT", "none")
            .env_remove("CEDOS_KEY_FILE")
            .env_remove("CEDOS_PROX");
        command
    }

    /// Runs the program, which must succeed. Returns its output.
    pub fn run(&self, arguments: &[&str]) -> String {
        let output = self.command().args(arguments).output();
        told(&self.name, output.expect("it runs"))
    }
}

/// A process that is ended with the test, and the first line of its output.
pub struct Server(pub Child, pub String);

impl Server {
    /// Starts a program whose first line of output is its address.
    pub fn start(program: &CProgram) -> Server {
        let process = program.command().stdout(Stdio::piped()).spawn();
        let mut process = process.expect("it runs");
        let mut line = String::new();
        let said = BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line);
        said.expect("its address");
        Server(process, line.trim().to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The process never ends by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The output of a program, which must have succeeded.
pub fn told(name: &str, output: Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{name}: {}\n{said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

/// The lines of a chapter of docs/sockets.md.
pub fn document(chapter: &str) -> Vec<String> {
    let path = here().join("../../docs/sockets.md");
    let text = std::fs::read_to_string(path).expect("docs/sockets.md");
    let lines = text.lines().skip_while(|line| *line != chapter).skip(1);
    let lines: Vec<String> = lines
        .take_while(|line| !line.starts_with("## "))
        .map(str::to_owned)
        .collect();
    assert!(
        !lines.is_empty(),
        "docs/sockets.md has no chapter {chapter:?}"
    );
    lines
}
