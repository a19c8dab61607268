//! The files of a local folder. Symbolic links are neither followed nor mirrored.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use jiff::Timestamp;

use super::relative_path::RelativePath;

/// The kind of the file at a path of the folder that is written to.
#[derive(Debug, PartialEq, Eq)]
pub enum LocalState {
    /// Nothing, or a symbolic link, which a file replaces.
    Absent,
    /// A regular file is there.
    File {
        /// The file's length in bytes.
        bytes: u64,
        /// When the file was changed, to the second.
        modified_s: i64,
    },
}

impl LocalState {
    /// The kind of the file at `path` below `folder`.
    ///
    /// # Errors
    /// A file cannot be put there; in words.
    pub fn of(folder: &Path, path: &RelativePath) -> Result<LocalState, String> {
        for parent in path.folders() {
            match parent.below(folder).symlink_metadata() {
                Ok(found) if found.is_dir() => {}
                Ok(found) if found.is_symlink() => {
                    return Err(format!(
                        "{parent} is a symbolic link, which is not followed"
                    ));
                }
                Ok(_) => return Err(format!("{parent} is a file here, and a folder there")),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Ok(LocalState::Absent);
                }
                Err(error) => return Err(format!("cannot read {parent}: {error}")),
            }
        }
        match path.below(folder).symlink_metadata() {
            Ok(found) if found.is_file() => Ok(LocalState::File {
                bytes: found.len(),
                modified_s: found.mtime(),
            }),
            Ok(found) if found.is_symlink() => Ok(LocalState::Absent),
            Ok(_) => Err("it is a folder or a device here, and a file there".to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(LocalState::Absent),
            Err(error) => Err(format!("cannot read it: {error}")),
        }
    }
}

/// The files of a folder.
#[derive(Debug, Default)]
pub struct LocalTree {
    /// The paths of the files, in order.
    pub files: Vec<RelativePath>,
    /// Symbolic links and devices, which are left out.
    pub others: Vec<RelativePath>,
    /// Errors of names that cannot be mirrored, a sentence each.
    pub refused: Vec<String>,
}

impl LocalTree {
    /// Reads a folder.
    ///
    /// # Errors
    /// From the disk.
    pub fn read(folder: &Path) -> io::Result<LocalTree> {
        let mut tree = LocalTree::default();
        let mut folders = vec![RelativePath::root()];
        while let Some(path) = folders.pop() {
            for entry in std::fs::read_dir(path.below(folder))? {
                let entry = entry?;
                let name = entry.file_name();
                let child = name.to_str().ok_or_else(|| {
                    format!("{}/{}: the name is not UTF-8", path, name.to_string_lossy())
                });
                let child = match child.and_then(|name| path.child(name)) {
                    Ok(child) => child,
                    Err(why) => {
                        let is_staging = path.depth() == 0 && name == super::relative_path::STAGING;
                        if !is_staging {
                            tree.refused.push(why);
                        }
                        continue;
                    }
                };
                // Of the entry itself: a link is a link.
                let kind = entry.file_type()?;
                if kind.is_dir() {
                    folders.push(child);
                } else if kind.is_file() {
                    tree.files.push(child);
                } else {
                    tree.others.push(child);
                }
            }
        }
        tree.files.sort();
        Ok(tree)
    }
}

/// Puts a complete file in its place: `staged` gets the time of the original, and its name in one step.
///
/// # Errors
/// From the disk, or something else than a folder is in the way.
pub fn put_in_place(
    staged: &Path,
    folder: &Path,
    path: &RelativePath,
    modified: Option<Timestamp>,
) -> io::Result<Metadata> {
    if let Some(at) = modified {
        let file = std::fs::File::options().write(true).open(staged)?;
        file.set_modified(at.into())?;
    }
    for parent in path.folders() {
        let at = parent.below(folder);
        match std::fs::create_dir(&at) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                // Not by the name of a link: who made it may want the file elsewhere.
                if !at.symlink_metadata()?.is_dir() {
                    let text = format!("{parent} is no folder");
                    return Err(io::Error::new(io::ErrorKind::NotADirectory, text));
                }
            }
            made => made?,
        }
    }
    let to = path.below(folder);
    std::fs::rename(staged, &to)?;
    to.symlink_metadata()
}

/// Removes a file, and the folders above it that are empty then.
///
/// # Errors
/// From the disk.
pub fn remove(folder: &Path, path: &RelativePath) -> io::Result<()> {
    std::fs::remove_file(path.below(folder))?;
    let mut above = path.parent();
    while let Some(parent) = above.filter(|parent| parent.depth() > 0) {
        // One that is not empty stays.
        if std::fs::remove_dir(parent.below(folder)).is_err() {
            break;
        }
        above = parent.parent();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn path(text: &str) -> RelativePath {
        text.split('/').fold(RelativePath::root(), |path, name| {
            path.child(name).expect("a name")
        })
    }

    #[test]
    fn a_link_is_neither_followed_nor_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let (inside, outside) = (folder.path().join("in"), folder.path().join("out"));
        std::fs::create_dir_all(inside.join("d")).expect("made");
        std::fs::create_dir(&outside).expect("made");
        std::fs::write(outside.join("a"), "precious").expect("written");
        std::fs::write(inside.join("d/a"), "a").expect("written");
        symlink(&outside, inside.join("away")).expect("linked");
        symlink(outside.join("a"), inside.join("file")).expect("linked");
        let tree = LocalTree::read(&inside).expect("read");
        assert_eq!(tree.files, [path("d/a")]);
        assert_eq!(tree.others.len(), 2);
        let error = LocalState::of(&inside, &path("away/a")).expect_err("a link");
        assert!(error.contains("symbolic link"), "{error}");
        assert_eq!(
            LocalState::of(&inside, &path("file")),
            Ok(LocalState::Absent)
        );
        LocalState::of(&inside, &path("d")).expect_err("a folder");
        LocalState::of(&inside, &path("d/a/b")).expect_err("below a file");
        std::fs::write(inside.join("new"), "new").expect("written");
        let staged = inside.join("new");
        put_in_place(&staged, &inside, &path("away/a"), None).expect_err("a link");
        put_in_place(&staged, &inside, &path("file"), None).expect("in place of a link");
        let read = |name: &Path| std::fs::read_to_string(name).expect("read");
        assert_eq!(read(&outside.join("a")), "precious");
        assert_eq!(read(&inside.join("file")), "new");
    }

    #[test]
    fn a_file_gets_its_time_and_folders_and_leaves_none_that_are_empty() {
        let folder = tempfile::tempdir().expect("a folder");
        let staged = folder.path().join("staged");
        std::fs::write(&staged, "abc").expect("written");
        let at: Timestamp = "2020-01-01T00:00:00Z".parse().expect("a time");
        put_in_place(&staged, folder.path(), &path("x/y/a"), Some(at)).expect("placed");
        let state = LocalState::of(folder.path(), &path("x/y/a"));
        let modified_s = at.as_second();
        assert_eq!(
            state,
            Ok(LocalState::File {
                bytes: 3,
                modified_s
            })
        );
        remove(folder.path(), &path("x/y/a")).expect("removed");
        assert_eq!(std::fs::read_dir(folder.path()).expect("read").count(), 0);
    }
}
