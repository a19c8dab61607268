//! What a proxy keeps in its state directory: the journal, and which node it is; and the store that it shares with other
//! nodes of its key.

use std::fs::{DirBuilder, File, TryLockError};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use cedos_prox::ProxConfig;
use d2tp_driver::{Journal, JournalBatch, JournalError, PublicKey, SecretKey};
use d2tp_store::{RedisStore, RedisStoreOptions};

use super::prox::ProxArgs;

/// Creates a directory that only this user can use: requests in it may contain credentials. One that exists
/// is left as it is.
pub(super) fn create_private_dir(dir: &Path) -> std::io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(dir)
}

/// How soon a process that serves again tries again what it cannot do without.
const RESUME_AGAIN_AFTER: Duration = Duration::from_secs(2); // a guess

/// How long a process that ends may still have the journal.
const JOURNAL_FREE_WITHIN: Duration = Duration::from_secs(5); // a guess: it has ended already

/// The journal in a state directory that another process is about to release.
pub(super) async fn reopen_journal(dir: &Path, key: &SecretKey) -> anyhow::Result<Journal> {
    let began = tokio::time::Instant::now();
    loop {
        match open_journal(dir, key) {
            Err(error) if is_taken(&error) && began.elapsed() < JOURNAL_FREE_WITHIN => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            opened => return opened,
        }
    }
}

fn is_taken(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(JournalError::Taken { .. }))
}

/// The journal in a state directory, which belongs to one key.
pub(super) fn open_journal(dir: &Path, key: &SecretKey) -> anyhow::Result<Journal> {
    let journal = Journal::open(&dir.join("journal"))?;
    let ours = key.public().0.to_vec();
    match journal.note(b"key")? {
        Some(theirs) if theirs != ours => anyhow::bail!(
            "the state in {} belongs to another key ({}); use that key, or name another directory",
            dir.display(),
            PublicKey(theirs.try_into().unwrap_or_default())
        ),
        Some(_) => {}
        None => {
            let mut batch = JournalBatch::default();
            batch.notes.insert(b"key".to_vec(), Some(ours.into()));
            journal.commit(&batch)?;
        }
    }
    Ok(journal)
}

/// The file in a node's state directory that says which node it is. Its process has locked it.
const NODE_FILE: &str = "node";

/// Locks a node's state directory, which a process that ends may still have.
pub(super) async fn lock_node(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join(NODE_FILE);
    let file = File::options().read(true).write(true).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let began = tokio::time::Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) if began.elapsed() < JOURNAL_FREE_WITHIN => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(TryLockError::WouldBlock) => anyhow::bail!(
                "{} is in use by another process; stop the other proxy, or give another --state-dir",
                dir.display()
            ),
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

/// What distinguishes the node with this state directory from others, for all of its processes.
fn node_identity(dir: &Path) -> std::io::Result<String> {
    let path = dir.join(NODE_FILE);
    match std::fs::read_to_string(&path) {
        Ok(identity) if !identity.trim().is_empty() => return Ok(identity.trim().to_owned()),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let identity = format!("{:016x}", getrandom::u64()?);
    std::fs::write(&path, format!("{identity}\n"))?;
    Ok(identity)
}

/// The settings of a store that this proxy shares with other nodes of its key.
pub(super) struct SharedStoreSettings {
    url: String,
    node: String,
    holder: String,
}

impl SharedStoreSettings {
    /// The settings, if there is a store, and their directories, which are made.
    pub(super) fn of(config: &ProxConfig, args: &ProxArgs) -> anyhow::Result<Option<Self>> {
        let Some(url) = config.store.clone() else {
            return Ok(None);
        };
        let node = config.node.clone();
        let node = node.context("--store needs --node NAME, a name that no other node has")?;
        let dir = args.state_dir.as_deref();
        let dir = dir.context("--store needs --state-dir DIR, a directory of this node")?;
        let copies = match (config.copies_dir.as_deref(), &config.copies) {
            (Some(copies), None) => copies,
            // What a node writes goes to the bucket from its own directory.
            (None, Some(_)) => dir,
            (None, None) => anyhow::bail!(
                "--store needs --copies-dir DIR, a directory that all nodes see, or --copies s3://BUCKET/PREFIX"
            ),
            (Some(_), Some(_)) => anyhow::bail!(
                "--store keeps copies in --copies-dir or in --copies; leave one of them out"
            ),
        };
        anyhow::ensure!(
            args.key.is_some(),
            "--store needs --key FILE, the same key on all nodes: they share nothing otherwise"
        );
        for dir in [dir, copies] {
            create_private_dir(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        }
        let holder = node_identity(dir)
            .with_context(|| format!("cannot use the state directory {}", dir.display()))?;
        Ok(Some(SharedStoreSettings { url, node, holder }))
    }

    /// Opens and checks the store. A running process of this node notices nothing of it.
    pub(super) async fn open(&self, key: &SecretKey) -> anyhow::Result<Arc<RedisStore>> {
        let key = &key.public().0[..8];
        let prefix: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let options = RedisStoreOptions {
            url: self.url.clone(),
            node: self.node.clone(),
            holder: self.holder.clone(),
            prefix: format!("cedos:{prefix}"),
            object_of: Arc::new(cedos_prox::copy_of_memo),
        };
        let opened = tokio::task::spawn_blocking(move || RedisStore::open(options));
        Ok(Arc::new(opened.await??))
    }

    /// Opens the store, which is waited for if it is away: devices wait in the sockets, and nothing else serves them.
    pub(super) async fn open_patiently(&self, key: &SecretKey) -> Arc<RedisStore> {
        loop {
            match self.open(key).await {
                Ok(store) => return store,
                Err(error) => {
                    tracing::error!(
                        error = format!("{error:#}"),
                        "cannot serve yet; trying again"
                    );
                    tokio::time::sleep(RESUME_AGAIN_AFTER).await;
                }
            }
        }
    }
}
