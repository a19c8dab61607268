//! Files and folders that a process may still use, by the kernel's Landlock (landlock(7)).
//!
//! A rule is about a file or folder that exists when it is made, and about all that is below it, whenever that comes.
//! A file that is *replaced* by another of its name is another file: whoever wants to read it then needs a rule about
//! its folder ([`FileAccess::read_replaceable`]).

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, make_bitflags,
};

use crate::sandbox_report::SandboxPart;

/// The rights that are taken away where the kernel knows them: those of Linux 6.10.
const HANDLED: ABI = ABI::V5;
/// The fewest rights that the kernel must know: before Linux 5.19, a rename to another folder is always refused.
const LEAST: ABI = ABI::V2;

/// Folders that hold much that a process has no business with: a file in one of them is allowed by itself.
const SHARED_FOLDERS: [&str; 12] = [
    "/", "/etc", "/tmp", "/var", "/var/tmp", "/var/lib", "/home", "/root", "/usr", "/opt", "/run",
    "/srv",
];

/// Files and folders that a process may use, and how.
#[derive(Clone, Debug, Default)]
pub struct FileAccess {
    rules: Vec<(PathBuf, BitFlags<AccessFs>)>,
}

impl FileAccess {
    /// Lets a file, or all below a folder, be read.
    pub fn read(&mut self, path: impl AsRef<Path>) -> &mut Self {
        self.allow(path, make_bitflags!(AccessFs::{ReadFile | ReadDir}))
    }

    /// Lets a file be read, also after another has replaced it, as editors do: all of its folder can be read. In a
    /// folder that many programs share, the file alone can be, and one that replaces it cannot.
    pub fn read_replaceable(&mut self, file: impl AsRef<Path>) -> &mut Self {
        let file = file.as_ref();
        // Where a symbolic link leads, and where it is: either may be replaced.
        let targets = [
            std::path::absolute(file).ok(),
            std::fs::canonicalize(file).ok(),
        ];
        for target in targets.into_iter().flatten() {
            match own_folder(&target) {
                Some(folder) => self.read(folder),
                None => self.read(&target),
            };
        }
        self
    }

    /// Lets a file, or all below a folder, be read, written, made, renamed and removed, and not run.
    pub fn write(&mut self, path: impl AsRef<Path>) -> &mut Self {
        let refused = make_bitflags!(AccessFs::{Execute | MakeChar | MakeBlock});
        self.allow(path, AccessFs::from_all(HANDLED) & !refused)
    }

    /// Lets a file be written, also after it was renamed and is made again, as log files are: files can be made and
    /// written in its folder. In a folder that many programs share, only the file that exists can be. In the user's home,
    /// nothing else can be read, and everything can be written: a folder of its own is better.
    pub fn write_replaceable(&mut self, file: impl AsRef<Path>) -> &mut Self {
        let file = file.as_ref();
        let absolute = std::path::absolute(file).ok();
        if let Some(folder) = absolute.as_deref().and_then(Path::parent) {
            match own_folder(folder.join("file").as_path()) {
                Some(folder) => self.write(folder),
                None if is_home(folder) => {
                    self.allow(folder, make_bitflags!(AccessFs::{MakeReg | WriteFile}))
                }
                None => self,
            };
        }
        self.write(file)
    }

    /// Lets a program be run, and read.
    pub fn run(&mut self, program: impl AsRef<Path>) -> &mut Self {
        self.allow(program, make_bitflags!(AccessFs::{Execute | ReadFile}))
    }

    /// The files and folders for which there is a rule.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.rules.iter().map(|(path, _)| path.as_path())
    }

    fn allow(&mut self, path: impl AsRef<Path>, rights: BitFlags<AccessFs>) -> &mut Self {
        self.rules.push((path.as_ref().to_owned(), rights));
        self
    }

    /// Takes every right to other files from this thread and from those that it starts.
    pub(crate) fn restrict(&self) -> SandboxPart {
        let ruleset = without_rules().map_err(|_| NO_LANDLOCK.to_owned())?;
        self.apply(ruleset).map_err(|error| error.to_string())
    }

    fn apply(&self, mut ruleset: RulesetCreated) -> Result<(), RulesetError> {
        for (path, rights) in &self.rules {
            // What does not exist needs no rule.
            let Ok(opened) = PathFd::new(path) else {
                tracing::debug!(path = %path.display(), "no rule for a file that is not there");
                continue;
            };
            let rights = match path.is_dir() {
                true => *rights,
                false => *rights & AccessFs::from_file(HANDLED),
            };
            ruleset = ruleset.add_rule(PathBeneath::new(opened, rights))?;
        }
        ruleset.restrict_self()?;
        Ok(())
    }
}

const NO_LANDLOCK: &str =
    "this kernel has no Landlock, or one before Linux 5.19, or it is switched off";

/// Whether this kernel can restrict files.
///
/// # Errors
/// Why not.
pub fn check_file_restriction() -> Result<(), &'static str> {
    without_rules().map(drop).map_err(|_| NO_LANDLOCK)
}

/// A set of rules that refuses every right, if the kernel knows the least that is needed.
fn without_rules() -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(LEAST))?
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(HANDLED))?
        .create()
}

/// The folder of a file, unless many programs share it.
fn own_folder(file: &Path) -> Option<&Path> {
    let folder = file.parent()?;
    let is_shared = SHARED_FOLDERS
        .iter()
        .any(|shared| folder == Path::new(shared));
    (!is_home(folder) && !is_shared && folder.as_os_str() != "").then_some(folder)
}

fn is_home(folder: &Path) -> bool {
    std::env::var_os("HOME").is_some_and(|home| folder == Path::new(&home))
}

/// The folders of the libraries that this process has loaded.
pub fn loaded_libraries() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = loaded_files()
        .filter(|file| file.to_string_lossy().contains(".so"))
        .filter_map(|file| file.parent().map(Path::to_owned))
        .collect();
    folders.sort();
    folders.dedup();
    folders
}

/// The program that loads this one and its libraries (ld.so(8)); none if it is static.
pub fn program_loader() -> Option<PathBuf> {
    loaded_files().find(|file| {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("ld-") && name.contains(".so")
    })
}

/// Files of which parts are in this process's memory, as programs and libraries.
fn loaded_files() -> impl Iterator<Item = PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let files: Vec<PathBuf> = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
        .collect();
    files.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_a_shared_folder_does_not_open_the_folder() {
        assert_eq!(own_folder(Path::new("/etc/cedos.toml")), None);
        assert_eq!(own_folder(Path::new("/tmp/a.log")), None);
        assert_eq!(own_folder(Path::new("a.log")), None);
        let own = own_folder(Path::new("/etc/cedos/prox.toml"));
        assert_eq!(own, Some(Path::new("/etc/cedos")));
    }

    #[test]
    fn the_loader_of_a_dynamic_program_is_found() {
        // Static programs have none.
        if cfg!(target_env = "gnu") {
            let loader = program_loader().expect("a loader");
            assert!(loader.exists(), "{}", loader.display());
        }
    }
}
