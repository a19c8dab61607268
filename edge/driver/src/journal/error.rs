//! Why a journal cannot be used, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// The kind of a journal error, without the path.
#[derive(Debug)]
pub(super) enum JournalErrorKind {
    /// Another process has the journal open.
    Taken,
    /// The content of the file is damaged.
    Damaged(&'static str),
    /// The system reported an error.
    Io(io::Error),
    /// The store reported an error of its own.
    Store(String),
}

impl From<io::Error> for JournalErrorKind {
    fn from(error: io::Error) -> JournalErrorKind {
        JournalErrorKind::Io(error)
    }
}

impl From<redb::Error> for JournalErrorKind {
    fn from(error: redb::Error) -> JournalErrorKind {
        match error {
            redb::Error::DatabaseAlreadyOpen => JournalErrorKind::Taken,
            redb::Error::Corrupted(_) | redb::Error::RepairAborted => {
                JournalErrorKind::Damaged("its pages")
            }
            redb::Error::Io(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof
                ) =>
            {
                JournalErrorKind::Damaged("its header")
            }
            redb::Error::Io(error) => JournalErrorKind::Io(error),
            redb::Error::TableDoesNotExist(_)
            | redb::Error::TableTypeMismatch { .. }
            | redb::Error::TableIsMultimap(_)
            | redb::Error::TypeDefinitionChanged { .. } => JournalErrorKind::Damaged("its tables"),
            other => JournalErrorKind::Store(other.to_string()),
        }
    }
}

macro_rules! from_redb {
    ($($kind:ident),*) => {$(
        impl From<redb::$kind> for JournalErrorKind {
            fn from(error: redb::$kind) -> JournalErrorKind {
                redb::Error::from(error).into()
            }
        }
    )*};
}
from_redb!(
    DatabaseError,
    StorageError,
    TransactionError,
    TableError,
    CommitError
);

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another process has the journal open.
    #[error("the journal {} is in use by another process; end that one, or name another directory", .path.display())]
    Taken {
        /// Path of the file.
        path: PathBuf,
    },
    /// The file is damaged.
    #[error(
        "the journal {} is damaged ({what}), and cannot be used. Move it away to start without \
         it; downloads then request again what they lack", .path.display()
    )]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// The damaged part of the file.
        what: &'static str,
    },
    /// The disk is full.
    #[error(
        "the journal {} cannot be written: the disk is full; make room there. What was written \
         before is kept", .path.display()
    )]
    Full {
        /// Path of the file.
        path: PathBuf,
    },
    /// A store that nodes share cannot be reached, or cannot be written.
    #[error("the store {place} {cause}")]
    Store {
        /// The place of the store, without a password.
        place: String,
        /// What is wrong, and what to do, as the rest of the sentence.
        cause: String,
    },
    /// The system reported an error.
    #[error(
        "the journal {} cannot be used: {cause}; check the disk and the directory's permissions. \
         What was written before is kept", .path.display()
    )]
    Refused {
        /// Path of the file.
        path: PathBuf,
        /// The system's message.
        cause: String,
    },
}

impl JournalError {
    pub(super) fn new(path: &Path, cause: JournalErrorKind) -> JournalError {
        let path = path.to_owned();
        match cause {
            JournalErrorKind::Taken => JournalError::Taken { path },
            JournalErrorKind::Damaged(what) => JournalError::Damaged { path, what },
            JournalErrorKind::Io(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::StorageFull
                        | io::ErrorKind::QuotaExceeded
                        | io::ErrorKind::FileTooLarge
                ) =>
            {
                JournalError::Full { path }
            }
            JournalErrorKind::Io(error) => JournalError::Refused {
                path,
                cause: error.to_string(),
            },
            JournalErrorKind::Store(cause) => JournalError::Refused { path, cause },
        }
    }
}
