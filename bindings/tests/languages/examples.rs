//! The bindings' examples, built in a folder in which the library is installed. If a language's
//! tools are missing, a message says so and there is no example.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::{built_library, here, library, told};

/// The folder of all bindings.
pub fn bindings() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns a command that runs an example, without its arguments.
pub type Example = Box<dyn Fn() -> Command>;

/// Installs the header, the shared library and the file for pkg-config.
pub fn install(prefix: &Path) {
    let installed = Command::new("sh")
        .arg(here().join("install.sh"))
        .arg(prefix)
        .env("LIBRARIES", library().parent().expect("a folder"))
        .output();
    told("install.sh", installed.expect("a shell"));
}

/// A command that finds the installed library, and no agent.
pub fn command(prefix: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .env("XDG_CONFIG_HOME", prefix)
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env_remove("CEDOS_PROX");
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

pub fn python(prefix: &Path) -> Option<Example> {
    if !has("Python", &[("python3", "-V")]) {
        return None;
    }
    let prefix = prefix.to_owned();
    Some(Box::new(move || {
        let mut example = command(&prefix, "python3");
        example
            .arg(bindings().join("python/example.py"))
            .env("D2TP_LIBRARY", library())
            .env("PYTHONDONTWRITEBYTECODE", "1");
        example
    }))
}

pub fn go(prefix: &Path) -> Option<Example> {
    if !has("Go", &[("go", "version")]) {
        return None;
    }
    let program = prefix.join("example");
    let built = command(prefix, "go")
        // The path of the library is part of the cache's keys.
        .env("GOCACHE", prefix.join("go-cache"))
        .args(["build", "-o"])
        .arg(&program)
        .arg("./example")
        .current_dir(bindings().join("go"))
        // Only the standard library, and no newer compiler.
        .env("GOFLAGS", "-mod=mod")
        .env("GOPROXY", "off")
        .env("GOTOOLCHAIN", "local")
        .output();
    told("go build", built.expect("it runs"));
    let prefix = prefix.to_owned();
    Some(Box::new(move || command(&prefix, &program)))
}

pub fn node(prefix: &Path) -> Option<Example> {
    if !has("Node", &[("node", "--version")]) {
        return None;
    }
    // Node loads only files with that extension, and resolves symbolic links.
    let binding = prefix.join("d2tp.node");
    std::fs::copy(built_library("libd2tp_node.so"), &binding).expect("a copy");
    let prefix = prefix.to_owned();
    Some(Box::new(move || {
        let mut example = command(&prefix, "node");
        example
            .arg(bindings().join("node/example.js"))
            .env("D2TP_BINDING", &binding);
        example
    }))
}

/// Compiles Java's classes and their native part; returns the folder.
fn java_classes(prefix: &Path) -> PathBuf {
    let classes = prefix.join("java");
    let built = command(prefix, "sh")
        .arg(bindings().join("java/build.sh"))
        .arg(&classes)
        .output();
    told("build.sh", built.expect("a shell"));
    classes
}

/// A command for the JVM, with the native part in `native`.
fn on_jvm(prefix: &Path, native: &Path, classpath: &OsStr, main: &'static str) -> Option<Example> {
    let mut library = OsString::from("-Dd2tp.library=");
    library.push(native.join("libd2tp_java.so"));
    let (prefix, classpath) = (prefix.to_owned(), classpath.to_owned());
    Some(Box::new(move || {
        let mut example = command(&prefix, "java");
        example.arg(&library).arg("-cp").arg(&classpath).arg(main);
        example
    }))
}

pub fn java(prefix: &Path) -> Option<Example> {
    if !has("Java", &[("javac", "-version")]) {
        return None;
    }
    let classes = java_classes(prefix);
    on_jvm(prefix, &classes, classes.as_os_str(), "Example")
}

pub fn kotlin(prefix: &Path) -> Option<Example> {
    if !has("Kotlin", &[("mvn", "-version"), ("javac", "-version")]) {
        return None;
    }
    let classes = prefix.join("kotlin");
    let needed = by_maven(&classes)?;
    let native = java_classes(prefix);
    let path = format!("{0}/classes:{0}/test-classes:{needed}", classes.display());
    on_jvm(prefix, &native, OsStr::new(&path), "ExampleKt")
}

/// How long Maven may take to download the dependencies, about 110 MB.
const FETCHING_MAX: &str = "240s";

/// Compiles Kotlin's library and example into `to`; returns the class path of their dependencies:
/// those that Maven has, or else downloaded ones. Returns `None` if they cannot be downloaded.
fn by_maven(to: &Path) -> Option<String> {
    let classpath = to.join("classpath");
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
