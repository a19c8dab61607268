//! Which files are mirrored: `--include` and `--exclude`, with patterns as rclone writes them.
//!
//! | pattern | is |
//! |---|---|
//! | `*.jpg` | such a name in any folder |
//! | `/*.jpg` | such a name in the top folder alone |
//! | `photos/*.jpg` | such a name in any folder `photos` |
//! | `cache/` | everything in any folder `cache` |
//! | `**` | as `*`, and slashes too |
//! | `?`, `[a-z]`, `{jpg,png}` | one character; one of these; one of these words |
//!
//! A file is left out if an exclude fits, and else if there are includes and none fits.

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::relative_path::RelativePath;

/// Which files are mirrored.
#[derive(Debug, Clone)]
pub struct PathFilter {
    include: Option<GlobSet>,
    exclude: GlobSet,
    /// The excludes without classes of characters: such as `[!a]` fits some names that nobody has, and not all names.
    exclude_any: GlobSet,
}

impl PathFilter {
    /// The filter of these patterns.
    ///
    /// # Errors
    /// One is none; in words.
    pub fn new(include: &[String], exclude: &[String]) -> Result<PathFilter, String> {
        Ok(PathFilter {
            include: match include.is_empty() {
                true => None,
                false => Some(set_of(include)?),
            },
            exclude: set_of(exclude)?,
            exclude_any: {
                let plain = exclude.iter().filter(|pattern| !pattern.contains('['));
                set_of(&plain.cloned().collect::<Vec<_>>())?
            },
        })
    }

    /// Whether a file is mirrored.
    pub fn takes(&self, path: &RelativePath) -> bool {
        let text = path.text();
        let is_included = self.include.as_ref().is_none_or(|set| set.is_match(&text));
        is_included && !self.exclude.is_match(&text)
    }

    /// Whether nothing in a folder is mirrored, so that it need not be listed.
    pub fn skips_folder(&self, path: &RelativePath) -> bool {
        // Only what fits any name in it fits this one.
        let text = format!("{}/\u{1}", path.text());
        self.exclude_any.is_match(&text) && self.exclude_any.is_match(format!("{text}/\u{1}"))
    }
}

fn set_of(patterns: &[String]) -> Result<GlobSet, String> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        let refuse = |why: &str| format!("`{pattern}` is not a pattern of names: {why}");
        if pattern.is_empty() || pattern == "/" {
            return Err(refuse("it is empty"));
        }
        if pattern.contains("{{") {
            return Err(refuse("regular expressions in {{}} are not supported"));
        }
        let anchored = match pattern.strip_prefix('/') {
            Some(pattern) => pattern.to_owned(),
            None => format!("**/{pattern}"),
        };
        let whole = match anchored.ends_with('/') {
            true => format!("{anchored}**"),
            false => anchored,
        };
        let glob = GlobBuilder::new(&across_folders(&whole))
            .literal_separator(true)
            .backslash_escape(true)
            .build()
            .map_err(|error| refuse(&error.kind().to_string()))?;
        set.add(glob);
    }
    set.build().map_err(|error| error.to_string())
}

/// The pattern with each `**` that is not a whole name as globset writes it, for which it is `*` otherwise:
/// `dir/**.jpg` is `dir/{*,*/**/*}.jpg`.
fn across_folders(pattern: &str) -> String {
    let mut spread = String::new();
    let mut rest = pattern;
    while let Some(at) = rest.find("**") {
        let (before, stars) = rest.split_at(at);
        let after = stars.trim_start_matches('*');
        spread += before;
        let is_name = (spread.is_empty() || spread.ends_with('/'))
            && (after.is_empty() || after.starts_with('/'));
        spread += if is_name { "**" } else { "{*,*/**/*}" };
        rest = after;
    }
    spread + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> RelativePath {
        text.split('/').fold(RelativePath::root(), |path, name| {
            path.child(name).expect("a name")
        })
    }

    fn takes(include: &[&str], exclude: &[&str], text: &str) -> bool {
        let owned = |all: &[&str]| {
            all.iter()
                .map(|text| (*text).to_owned())
                .collect::<Vec<_>>()
        };
        let filter = PathFilter::new(&owned(include), &owned(exclude)).expect("patterns");
        filter.takes(&path(text))
    }

    #[test]
    fn patterns_are_those_of_rclone() {
        // The table of rclone's page on filtering.
        for (pattern, fits, others) in [
            (
                "file.jpg",
                &["file.jpg", "dir/file.jpg"][..],
                &["afile.jpg"][..],
            ),
            ("/file.jpg", &["file.jpg"], &["dir/file.jpg"]),
            ("*.jpg", &["file.jpg", "dir/file.jpg"], &["file.jpg.old"]),
            ("dir/*.jpg", &["dir/a.jpg", "x/dir/a.jpg"], &["dir/x/a.jpg"]),
            ("dir/**.jpg", &["dir/a.jpg", "dir/x/a.jpg"], &["a.jpg"]),
            ("/a**z", &["az", "a/z", "ab/c/yz"], &["b/az", "a/zb"]),
            ("dir/", &["dir/a", "dir/x/a", "y/dir/a"], &["dir", "adir/a"]),
            ("/dir/**", &["dir/a", "dir/x/a"], &["y/dir/a"]),
            ("*.{jpg,png}", &["a.png"], &["a.gif"]),
            ("a?[0-9].txt", &["ab1.txt"], &["a1.txt", "a/1.txt"]),
        ] {
            for text in fits {
                assert!(takes(&[pattern], &[], text), "{pattern} {text}");
                assert!(!takes(&[], &[pattern], text), "{pattern} {text}");
            }
            for text in others {
                assert!(!takes(&[pattern], &[], text), "{pattern} {text}");
                assert!(takes(&[], &[pattern], text), "{pattern} {text}");
            }
        }
    }

    #[test]
    fn an_exclude_wins_over_an_include() {
        assert!(takes(&["*.jpg"], &["private/"], "a.jpg"));
        assert!(!takes(&["*.jpg"], &["private/"], "private/a.jpg"));
        assert!(takes(&[], &[], "anything"));
    }

    #[test]
    fn a_folder_of_which_everything_is_excluded_is_not_listed() {
        let skips = |exclude: &str, folder: &str| {
            let filter = PathFilter::new(&[], &[exclude.to_owned()]).expect("a pattern");
            filter.skips_folder(&path(folder))
        };
        assert!(skips("cache/", "cache") && skips("/a/**", "a"));
        assert!(!skips("*.jpg", "a") && !skips("cache/*", "cache") && !skips("/a/", "b/a"));
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for bad in ["", "/", "[a", "{a", "{{a.*}}"] {
            PathFilter::new(&[bad.to_owned()], &[]).expect_err(bad);
        }
    }
}
