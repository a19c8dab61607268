//! The bindings' examples. The library is installed once for all tests of a process, and an example that must be
//! compiled is compiled once. If a language's tools are missing, a message says so and there is no example.

use std::ffi::OsStr;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::support::{built_library, here, library, told};

/// The folder of all bindings.
pub fn bindings() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns a command that runs an example, without its arguments.
pub type Example = Box<dyn Fn() -> Command>;

/// The folder of what outlives a run of the tests: the installed library, Go's cache, Kotlin's classes.
const KEPT: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/languages");

/// The library as it is installed for the tests of this process.
struct Installation {
    folder: PathBuf,
    /// Keeps another process from removing the folder.
    _lock: File,
}

/// The folder in which the header, the libraries and the file for pkg-config are installed, a new one in each
/// process.
pub fn installed() -> &'static Path {
    static INSTALLATION: OnceLock<Installation> = OnceLock::new();
    &INSTALLATION.get_or_init(install).folder
}

fn install() -> Installation {
    std::fs::create_dir_all(KEPT).expect("a folder");
    let lock = File::create(Path::new(KEPT).join("lock")).expect("a file");
    lock.lock().expect("a lock");
    let of_others = Path::new(KEPT).join("installed");
    let _ = std::fs::remove_dir_all(&of_others);
    std::fs::create_dir(&of_others).expect("a folder");
    let folder = tempfile::tempdir_in(of_others).expect("a folder").keep();
    let output = Command::new("sh")
        .arg(here().join("install.sh"))
        .arg(&folder)
        .env("LIBRARIES", library().parent().expect("a folder"))
        .output();
    told("install.sh", output.expect("a shell"));
    Installation {
        folder,
        _lock: lock,
    }
}

/// A command that finds the installed library, has its key and state in `home`, and no agent.
pub fn command(home: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = on_installed(program);
    command
        .env("XDG_CONFIG_HOME", home)
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env_remove("CEDOS_PROX");
    command
}

/// A command that finds the installed library.
fn on_installed(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env("PKG_CONFIG_PATH", installed().join("lib/pkgconfig"))
        .env("LD_LIBRARY_PATH", installed().join("lib"));
    command
}

/// Whether all of these programs are installed; if not, prints which is missing.
fn has(language: &str, tools: &[(&str, &str)]) -> bool {
    let tools = tools.iter().chain(&CC);
    let missing = tools.into_iter().find(|(tool, argument)| {
        let said = Command::new(tool).arg(argument).output();
        !said.is_ok_and(|said| said.status.success())
    });
    if let Some((tool, _)) = missing {
        eprintln!("{language} not tried: no {tool} here");
    }
    missing.is_none()
}

/// The tools that all bindings but Python's need.
const CC: [(&str, &str); 2] = [("cc", "--version"), ("pkg-config", "--version")];

/// Python's example, with its key in `home`.
pub fn python(home: &Path) -> Option<Example> {
    if !has("Python", &[("python3", "-V")]) {
        return None;
    }
    let home = home.to_owned();
    Some(Box::new(move || {
        let mut example = command(&home, "python3");
        example
            .arg(bindings().join("python/example.py"))
            .env("D2TP_LIBRARY", library())
            .env("PYTHONDONTWRITEBYTECODE", "1");
        example
    }))
}

/// Go's example, with its key in `home`.
pub fn go(home: &Path) -> Option<Example> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(build_go).as_ref()?;
    let home = home.to_owned();
    Some(Box::new(move || command(&home, program)))
}

/// Compiles Go's example; returns its program.
fn build_go() -> Option<PathBuf> {
    if !has("Go", &[("go", "version")]) {
        return None;
    }
    // Go's cache knows a package by its files and its folder, not by the library and the header: a new folder is
    // compiled.
    let package = installed().join("go");
    let copied = Command::new("cp")
        .arg("-R")
        .args([&bindings().join("go"), &package])
        .output();
    told("cp", copied.expect("it runs"));
    let program = installed().join("example");
    let built = on_installed("go")
        // Go's own library takes most of the time, and is compiled once.
        .env("GOCACHE", Path::new(KEPT).join("go-cache"))
        .args(["build", "-o"])
        .arg(&program)
        .arg("./example")
        .current_dir(&package)
        // Only the standard library, and no newer compiler.
        .env("GOFLAGS", "-mod=mod")
        .env("GOPROXY", "off")
        .env("GOTOOLCHAIN", "local")
        .output();
    told("go build", built.expect("it runs"));
    Some(program)
}

/// Node's example, with its key in `home`.
pub fn node(home: &Path) -> Option<Example> {
    if !has("Node", &[("node", "--version")]) {
        return None;
    }
    // Node loads only files with that extension, and resolves symbolic links.
    static BINDING: OnceLock<PathBuf> = OnceLock::new();
    let binding = BINDING.get_or_init(|| {
        let binding = installed().join("d2tp.node");
        std::fs::copy(built_library("libd2tp_node.so"), &binding).expect("a copy");
        binding
    });
    let home = home.to_owned();
    Some(Box::new(move || {
        let mut example = command(&home, "node");
        example
            .arg(bindings().join("node/example.js"))
            .env("D2TP_BINDING", binding);
        example
    }))
}

/// The folder with Java's classes and their native part.
fn java_classes() -> &'static Path {
    static CLASSES: OnceLock<PathBuf> = OnceLock::new();
    CLASSES.get_or_init(|| {
        let classes = installed().join("java");
        let built = on_installed("sh")
            .arg(bindings().join("java/build.sh"))
            .arg(&classes)
            .output();
        told("build.sh", built.expect("a shell"));
        classes
    })
}

/// A command for the JVM.
fn on_jvm(home: &Path, classpath: impl AsRef<OsStr>, main: &'static str) -> Option<Example> {
    let native = java_classes().join("libd2tp_java.so");
    let library = format!("-Dd2tp.library={}", native.display());
    let (home, classpath) = (home.to_owned(), classpath.as_ref().to_owned());
    Some(Box::new(move || {
        let mut example = command(&home, "java");
        example.arg(&library).arg("-cp").arg(&classpath).arg(main);
        example
    }))
}

/// Java's example, with its key in `home`.
pub fn java(home: &Path) -> Option<Example> {
    if !has("Java", &[("javac", "-version")]) {
        return None;
    }
    on_jvm(home, java_classes(), "Example")
}

/// Kotlin's example, with its key in `home`.
pub fn kotlin(home: &Path) -> Option<Example> {
    static BUILT: OnceLock<Option<String>> = OnceLock::new();
    let classpath = BUILT.get_or_init(build_kotlin).as_ref()?;
    on_jvm(home, classpath, "ExampleKt")
}

/// Compiles Kotlin's example, unless that was done before with the same files; returns its class path.
fn build_kotlin() -> Option<String> {
    if !has("Kotlin", &[("mvn", "-version"), ("javac", "-version")]) {
        return None;
    }
    let mut digest = DefaultHasher::new();
    let tools = Command::new("mvn").arg("-version").output();
    tools.expect("it is there").stdout.hash(&mut digest);
    for part in ["kotlin/pom.xml", "kotlin/src", "kotlin/example", "java/src"] {
        add(&bindings().join(part), &mut digest);
    }
    installed();
    let kept = Path::new(KEPT).join("kotlin");
    let classes = kept.join(format!("{:016x}", digest.finish()));
    let needed = std::fs::read_to_string(classes.join(CLASSPATH));
    let is_there = |needed: &String| needed.split(':').all(|file| Path::new(file).is_file());
    let needed = match needed.ok().filter(is_there) {
        Some(needed) => needed,
        None => {
            let _ = std::fs::remove_dir_all(&kept);
            let unfinished = installed().join("kotlin");
            let needed = by_maven(&unfinished)?;
            std::fs::create_dir(&kept).expect("a folder");
            std::fs::rename(unfinished, &classes).expect("a new name");
            needed
        }
    };
    Some(format!(
        "{0}/classes:{0}/test-classes:{needed}",
        classes.display()
    ))
}

/// Adds the names and the contents of all files below `path` to a digest.
fn add(path: &Path, digest: &mut DefaultHasher) {
    path.hash(digest);
    if let Ok(entries) = std::fs::read_dir(path) {
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths {
            add(&path, digest);
        }
    } else {
        std::fs::read(path).expect("a file").hash(digest);
    }
}

/// The file in which Maven writes the class path.
const CLASSPATH: &str = "classpath";

/// How long Maven may take to download the dependencies, about 110 MB.
const FETCHING_MAX: &str = "240s";

/// Compiles Kotlin's library and example into `to`; returns the class path of their dependencies:
/// those that Maven has, or else downloaded ones. Returns `None` if they cannot be downloaded.
fn by_maven(to: &Path) -> Option<String> {
    let classpath = to.join(CLASSPATH);
    let maven = |more: &[&str]| {
        let mut maven = Command::new("timeout");
        maven
            .args([
                FETCHING_MAX,
                "mvn",
                "-B",
                "-q",
                "-ntp",
                "-Dstyle.color=never",
            ])
            .args(more)
            .arg(format!("-Dto={}", to.display()))
            .arg(format!("-Dmdep.outputFile={}", classpath.display()))
            .args(["-DincludeScope=test", "test-compile"])
            .arg("dependency:build-classpath")
            .current_dir(bindings().join("kotlin"));
        maven.output().expect("it runs")
    };
    let mut made = maven(&["-o"]);
    let lacks = |made: &Output, words: &str| {
        !made.status.success() && String::from_utf8_lossy(&made.stdout).contains(words)
    };
    // Maven has several messages for missing files.
    if !made.status.success() {
        made = maven(&["-U"]);
    }
    // The exit code of timeout(1).
    if made.status.code() == Some(124) {
        eprintln!("Kotlin not tried: Maven was not ready after {FETCHING_MAX}");
        return None;
    }
    // If Maven Central does not have a file, the answer is "not found", a mistake of the pom.
    if lacks(&made, "Could not transfer") {
        eprintln!("Kotlin not tried: Maven Central is not to be reached");
        return None;
    }
    told("mvn", made);
    Some(std::fs::read_to_string(classpath).expect("what Maven wrote"))
}
