//! `cedos completions` and `cedos man-pages`: files for shells and man(1), generated from clap's
//! command line.
//!
//! The program passes its own [`clap::Command`], so that `cedos` and `cedos-lab` each describe
//! themselves.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cedos_terminal::print_stdout;
use clap::{Args, Command, ValueEnum};
use clap_complete::{generate, shells};

/// Print what completes this command in a shell
///
/// For this session: `source <(cedos completions bash)`. For good, for you alone:
///
///   bash  cedos completions bash > ~/.local/share/bash-completion/completions/cedos
///   zsh   cedos completions zsh > DIR/_cedos, where DIR is in $fpath
///   fish  cedos completions fish > ~/.config/fish/completions/cedos.fish
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub struct CompletionsArgs {
    /// The shell to complete commands in
    shell: CompletionShell,
}

/// A shell that completions are made for.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

impl CompletionsArgs {
    /// Prints the completions of `command` for the shell.
    pub fn run(&self, mut command: Command) {
        let name = command.get_name().to_owned();
        let mut script = Vec::new();
        match self.shell {
            CompletionShell::Bash => generate(shells::Bash, &mut command, name, &mut script),
            CompletionShell::Zsh => generate(shells::Zsh, &mut command, name, &mut script),
            CompletionShell::Fish => generate(shells::Fish, &mut command, name, &mut script),
        }
        print_stdout(String::from_utf8_lossy(&script).trim_end());
    }
}

/// Write the manual pages into a directory: one of the command, one of each verb
#[derive(Debug, Args)]
pub struct ManPagesArgs {
    /// The directory; it is made if it does not exist
    directory: PathBuf,
}

impl ManPagesArgs {
    /// Writes the pages of `command` and of its verbs, except those in `elsewhere`, which another program documents.
    ///
    /// # Errors
    /// The directory cannot be written to.
    pub fn run(&self, command: Command, elsewhere: &[&str]) -> anyhow::Result<()> {
        write_pages(command, elsewhere, &self.directory)
            .with_context(|| format!("cannot write to {}", self.directory.display()))
    }
}

fn write_pages(command: Command, elsewhere: &[&str], directory: &Path) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    for verb in command.get_subcommands() {
        if !elsewhere.contains(&verb.get_name()) {
            write_page_with_verbs(verb, directory)?;
        }
    }
    write_page(&command, directory)
}

/// Writes the pages of a verb that is not hidden and of the verbs below it.
fn write_page_with_verbs(verb: &Command, directory: &Path) -> io::Result<()> {
    if verb.is_hide_set() || verb.get_name() == "help" {
        return Ok(());
    }
    for below in verb.get_subcommands() {
        write_page_with_verbs(below, directory)?;
    }
    write_page(verb, directory)
}

/// Writes the page of a command: what clap knows of it, and its examples, which `--help` has at its beginning.
fn write_page(command: &Command, directory: &Path) -> io::Result<()> {
    let man = clap_mangen::Man::new(command.clone().disable_help_subcommand(true));
    let mut page = Vec::new();
    man.render(&mut page)?;
    if let Some(examples) = command.get_before_help() {
        page.extend(examples_section(&examples.to_string()).into_bytes());
    }
    std::fs::write(directory.join(man.get_filename()), page)
}

/// The section of a manual page with these examples, as roff.
fn examples_section(examples: &str) -> String {
    let lines = examples.lines().filter(|line| line.starts_with("  "));
    // A minus that is not escaped is printed as a hyphen, which no shell takes for one.
    let lines = lines.map(|line| line.trim().replace('\\', "\\e").replace('-', "\\-"));
    let lines: Vec<String> = lines.map(|line| format!("\\&{line}\n")).collect();
    format!(".SH EXAMPLES\n.nf\n{}.fi\n", lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command::new("cedos")
            .subcommand(Command::new("get").about("Download"))
            .subcommand(Command::new("lab").about("Experiment"))
            .subcommand(Command::new("internal").hide(true))
    }

    fn pages(elsewhere: &[&str]) -> Vec<String> {
        let directory = tempfile::tempdir().expect("a directory");
        write_pages(command(), elsewhere, directory.path()).expect("pages");
        let entries = std::fs::read_dir(directory.path()).expect("the directory");
        let mut names: Vec<String> = entries
            .map(|entry| entry.expect("an entry").file_name().into_string())
            .map(|name| name.expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn every_visible_verb_has_a_page() {
        assert_eq!(pages(&[]), ["cedos-get.1", "cedos-lab.1", "cedos.1"]);
    }

    #[test]
    fn a_page_has_the_examples_of_the_help() {
        let get =
            Command::new("get").before_help("Examples:\n  cedos get -o a\n  cedos get 'b\\c'");
        let command = Command::new("cedos").subcommand(get);
        let directory = tempfile::tempdir().expect("a directory");
        write_pages(command, &[], directory.path()).expect("pages");
        let page = std::fs::read_to_string(directory.path().join("cedos-get.1")).expect("a page");
        let section = ".SH EXAMPLES\n.nf\n\\&cedos get \\-o a\n\\&cedos get 'b\\ec'\n.fi\n";
        assert!(page.ends_with(section), "{page}");
    }

    #[test]
    fn a_verb_of_another_program_has_its_page_there() {
        assert_eq!(pages(&["lab"]), ["cedos-get.1", "cedos.1"]);
    }
}
