//! Tests that the header, the library and their installed files agree.

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use support::{here, library, told};

fn header() -> String {
    std::fs::read_to_string(here().join("include/d2tp.h")).expect("the header")
}

/// The header that cbindgen generates from the sources, adapted for readers of C.
fn generated() -> String {
    let config = cbindgen::Config::from_file(here().join("cbindgen.toml"));
    let bindings = cbindgen::Builder::new()
        .with_config(config.expect("cbindgen.toml"))
        .with_src(here().join("src/lib.rs"))
        .generate();
    let mut text = Vec::new();
    bindings.expect("the sources parse").write(&mut text);
    let text = String::from_utf8(text).expect("UTF-8");
    let mut header = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let indent = line
            .strip_suffix("/*")
            .filter(|rest| rest.trim().is_empty());
        match indent.filter(|_| !header.is_empty()) {
            Some(indent) => {
                let inside = lines.by_ref().take_while(|line| line.trim() != "*/");
                comment(&mut header, indent, &inside.collect::<Vec<_>>());
            }
            // The first comment belongs to the file, from cbindgen.toml. C89 has no comment of this
            // kind.
            None => {
                let line = line.split("//").next().unwrap_or_default();
                header.extend([line.trim_end(), "\n"]);
            }
        }
    }
    // Rust cannot declare a function with any number of arguments.
    let [stated, any] = ["int command, long argument)", "int command, ...)"];
    assert!(header.contains(stated), "d2tp_fcntl is not as it was");
    header.replace(stated, any)
}

/// A comment of C: on one line if it fits, and without Rust's safety sections, because the kernel
/// checks pointers for C programs.
fn comment(header: &mut String, indent: &str, inside: &[&str]) {
    let lines = inside.iter().map(|line| line.trim());
    let mut lines: Vec<&str> = lines.take_while(|line| *line != "# Safety").collect();
    while lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    if let [line] = lines[..] {
        header.extend([indent, "/* ", line, " */\n"]);
        return;
    }
    for (at, line) in lines.iter().enumerate() {
        let start = if at == 0 { "/* " } else { " * " };
        header.extend([indent, start, line]);
        header.push_str(if at + 1 == lines.len() { " */\n" } else { "\n" });
    }
}

#[test]
fn the_header_is_generated_from_the_sources() {
    let generated = generated();
    // Set by `cargo xtask header`.
    if std::env::var_os("D2TP_WRITE_HEADER").is_some() {
        std::fs::write(here().join("include/d2tp.h"), generated).expect("the header");
        return;
    }
    assert!(
        header() == generated,
        "include/d2tp.h is not what the sources say: `cargo xtask header` makes it anew\n{generated}"
    );
}

/// Names of functions that the header declares.
fn declared() -> BTreeSet<String> {
    let text = header();
    let mut names = BTreeSet::new();
    for (at, _) in text.match_indices("d2tp_") {
        let name: String = text[at..]
            .chars()
            .take_while(|c| c.is_alphanumeric() || *c == '_')
            .collect();
        let before = text[..at].lines().last().unwrap_or_default();
        let is_call = text[at + name.len()..].starts_with('(');
        if is_call
            && (before.starts_with("int ")
                || before.starts_with("ssize_t ")
                || before.starts_with("void "))
        {
            names.insert(name);
        }
    }
    names
}

#[test]
fn the_library_has_what_the_header_declares_and_nothing_else() {
    let nm = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library())
        .output();
    let symbols = told("nm", nm.expect("binutils come with the compiler"));
    let exported: BTreeSet<String> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(str::to_owned)
        .collect();
    assert_eq!(declared(), exported);
    assert!(exported.len() > 25, "{exported:?}");
}

#[test]
fn every_call_has_a_man_page() {
    let mut shown = BTreeSet::new();
    for page in std::fs::read_dir(here().join("man")).expect("man pages") {
        let text = std::fs::read_to_string(page.expect("a page").path()).expect("a page");
        let names = text
            .lines()
            .skip_while(|line| *line != ".SH NAME")
            .nth(1)
            .expect("names");
        let names = names.split(" \\- ").next().unwrap_or_default();
        shown.extend(names.split(", ").map(str::to_owned));
    }
    assert_eq!(shown, declared());
}

#[test]
fn strict_c99_takes_the_header_and_the_documented_example() {
    let place = tempfile::tempdir().expect("a place");
    let text = std::fs::read_to_string(here().join("../../docs/sockets.md")).expect("the document");
    let example = text.split("```").nth(1).expect("an example");
    let example = example.trim_start_matches("c\n");
    let (head, body) = example.split_once("\n\n").expect("includes, then calls");
    let alone = "#include <d2tp.h>\nint main(void) { return 0; }\n".to_owned();
    for program in [
        alone,
        format!("{head}\nint main(void) {{\n{body}return 0; }}\n"),
    ] {
        let source = place.path().join("strict.c");
        std::fs::write(&source, program).expect("a file in our folder");
        let compiled = Command::new("cc")
            .args(["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"])
            .args(["-fsyntax-only", "-I"])
            .arg(here().join("include"))
            .arg(&source)
            .output();
        told("cc", compiled.expect("a C compiler"));
    }
}

/// Whether the compiler can link programs statically.
fn has_static_libc(place: &Path) -> bool {
    let source = place.join("nothing.c");
    std::fs::write(&source, "int main(void) { return 0; }\n").expect("a file in our folder");
    let compiled = Command::new("cc")
        .args(["-static", "-o"])
        .arg(place.join("nothing"))
        .arg(&source)
        .output();
    compiled.is_ok_and(|compiled| compiled.status.success())
}

#[test]
fn what_is_installed_compiles_and_runs_a_program_shared_and_static() {
    let place = tempfile::tempdir().expect("a place");
    let prefix = place.path().join("usr");
    let installed = Command::new("sh")
        .arg(here().join("install.sh"))
        .arg(&prefix)
        .env("LIBRARIES", library().parent().expect("a folder"))
        .output();
    told("install.sh", installed.expect("a shell"));
    assert!(prefix.join("share/man/man3/d2tp_socket.3").is_file());
    let flags = |arguments: &[&str]| -> Option<Vec<String>> {
        let said = Command::new("pkg-config")
            .args(arguments)
            .arg("d2tp")
            .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
            .output();
        // Without pkg-config, its file is read here.
        let Ok(said) = said else {
            eprintln!("no pkg-config here: the .pc file was not tried");
            return None;
        };
        let said = told("pkg-config", said);
        Some(said.split_whitespace().map(str::to_owned).collect())
    };
    let Some(shared) = flags(&["--cflags", "--libs"]) else {
        return;
    };
    let Some(mut fixed) = flags(&["--cflags", "--libs", "--static"]) else {
        return;
    };
    let mut whole = vec!["-static".to_owned()];
    whole.extend(fixed.iter().cloned());
    for flag in &mut fixed {
        if flag == "-ld2tp" {
            *flag = "-l:libd2tp.a".to_owned();
        }
    }
    let mut ways = vec![shared, fixed];
    match has_static_libc(place.path()) {
        true => ways.push(whole),
        false => eprintln!("no static C library here: -static was not tried"),
    }
    for flags in ways {
        let program = place.path().join("echo");
        let compiled = Command::new("cc")
            .arg("-o")
            .arg(&program)
            .arg(here().join("tests/c/echo.c"))
            .args(&flags)
            .output();
        told("cc", compiled.expect("a C compiler"));
        let ran = Command::new(&program)
            .env("LD_LIBRARY_PATH", prefix.join("lib"))
            .env("XDG_CONFIG_HOME", place.path())
            .env_remove("CEDOS_KEY_FILE")
            .output();
        assert_eq!(told("echo", ran.expect("it runs")), "ok\n", "{flags:?}");
    }
}
