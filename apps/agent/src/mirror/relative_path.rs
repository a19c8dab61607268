//! A file's path below the folder that is mirrored: names that lead nowhere else.

use std::fmt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use url::Url;

/// The folder with the parts of files, in the folder that is written to.
pub const STAGING: &str = ".cedos-sync";

/// The most names in a path: deeper folders are a loop, or an attack.
pub const DEPTH_MAX: usize = 64; // a guess

/// The most bytes of a name on the file systems of Linux.
const NAME_BYTES_MAX: usize = 255;

/// A path below a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelativePath(Vec<String>);

impl RelativePath {
    /// The path of the folder itself.
    pub fn root() -> RelativePath {
        RelativePath(Vec::new())
    }

    /// The path of what has this name in the folder at this path.
    ///
    /// # Errors
    /// It would be elsewhere, or no file system has such names; in words.
    pub fn child(&self, name: &str) -> Result<RelativePath, String> {
        let refuse = |why: &str| Err(format!("`{}`: {why}", name.escape_default()));
        match name {
            "" | "." | ".." => return refuse("the name leads out of the folder"),
            _ if name.contains(['/', '\0']) => return refuse("the name leads out of the folder"),
            // URLs leave some of them out, so that it would be another file's.
            _ if name.contains(char::is_control) => {
                return refuse("the name has control characters");
            }
            _ if name.len() > NAME_BYTES_MAX => return refuse("the name is too long"),
            STAGING if self.0.is_empty() => return refuse("this name is for parts of files"),
            _ if self.0.len() >= DEPTH_MAX => return refuse("the folders are too deep"),
            _ => {}
        }
        let mut names = self.0.clone();
        names.push(name.to_owned());
        Ok(RelativePath(names))
    }

    /// The path with slashes.
    pub fn text(&self) -> String {
        self.0.join("/")
    }

    /// The folder in which the last name is; none of the root.
    pub fn parent(&self) -> Option<RelativePath> {
        let (_, folder) = self.0.split_last()?;
        Some(RelativePath(folder.to_vec()))
    }

    /// The number of names.
    pub fn depth(&self) -> usize {
        self.0.len()
    }

    /// The path below `folder`.
    pub fn below(&self, folder: &Path) -> PathBuf {
        let mut path = folder.to_owned();
        path.extend(&self.0);
        path
    }

    /// The paths of the folders between the root and this file, outermost first.
    pub fn folders(&self) -> impl Iterator<Item = RelativePath> {
        (1..self.0.len()).map(|n| RelativePath(self.0[..n].to_vec()))
    }

    /// The URL below that of the folder. `is_folder`: with a slash at its end.
    pub fn url(&self, base: &Url, is_folder: bool) -> Url {
        let mut url = base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(&self.0);
            if is_folder {
                segments.push("");
            }
        }
        url
    }

    /// The name of the part of this file.
    pub fn staged_name(&self) -> String {
        hex::encode(&Sha256::digest(self.text())[..16])
    }
}

impl fmt::Display for RelativePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_leads_out_of_the_folder_is_refused() {
        let root = RelativePath::root();
        for bad in ["", ".", "..", "../a", "/etc/passwd", "a/b", "a\0b"] {
            let error = root.child(bad).expect_err(bad);
            assert!(error.contains("leads out"), "{error}");
        }
        root.child(STAGING).expect_err("parts");
        root.child(&"a".repeat(256)).expect_err("too long");
        let below = root.child("a").and_then(|a| a.child(STAGING));
        assert_eq!(below.expect("a name").text(), "a/.cedos-sync");
        let mut deep = root;
        for _ in 0..DEPTH_MAX {
            deep = deep.child("d").expect("a name");
        }
        deep.child("d").expect_err("too deep");
    }

    #[test]
    fn a_path_is_one_below_a_folder_and_below_a_url() {
        let path = RelativePath::root()
            .child("a b")
            .and_then(|folder| folder.child("50%?#.txt"))
            .expect("names");
        assert_eq!(path.below(Path::new("/m")), Path::new("/m/a b/50%?#.txt"));
        for base in ["https://h/x/", "https://h/x"] {
            let url = path.url(&base.parse().expect("a URL"), false);
            assert_eq!(url.as_str(), "https://h/x/a%20b/50%25%3F%23.txt");
        }
        let folders: Vec<String> = path.folders().map(|folder| folder.text()).collect();
        assert_eq!(folders, ["a b"]);
        let folder = path.parent().expect("a folder");
        let url = folder.url(&"d2tp://h:1/K/x/".parse().expect("a URL"), true);
        assert_eq!(url.as_str(), "d2tp://h:1/K/x/a%20b/");
    }
}
