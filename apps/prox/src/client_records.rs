//! Clients that invitations enrolled, and invitations, as they are kept: in a file of one proxy, or in the store that
//! several nodes share.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;

use d2tp_driver::HostKey;
use serde::{Deserialize, Serialize};

use crate::client_limits::ClientLimits;
use crate::client_store_error::ClientStoreError;
use crate::invitation::InvitationHash;
use crate::private_file::replace_private;

/// A client that an invitation enrolled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolledClient {
    /// The name by which the operator knows the client; unique.
    pub name: String,
    /// The client's public key.
    #[serde(with = "crate::key_text::one")]
    pub key: HostKey,
    /// When the client was enrolled, in seconds since 1970.
    pub enrolled_s: u64,
    /// When the client last opened a flow, in seconds since 1970; none if it never did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_s: Option<u64>,
    /// The limits that the operator set for the client.
    #[serde(default, skip_serializing_if = "ClientLimits::is_default")]
    pub limits: ClientLimits,
}

/// An invitation as it is stored: without its secret.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoredInvitation {
    pub(crate) hash: InvitationHash,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    pub(crate) expires_s: u64,
    /// The client that used it.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        with = "crate::key_text::option"
    )]
    pub(crate) used_by: Option<HostKey>,
}

/// An invitation that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenInvitation {
    /// What the operator calls it by.
    pub id: String,
    /// What the client will be called; none: as the device suggests.
    pub name: Option<String>,
    /// When the invitation expires, in seconds since 1970.
    pub expires_s: u64,
}

impl StoredInvitation {
    pub(crate) fn is_open(&self, now_s: u64) -> bool {
        self.used_by.is_none() && now_s < self.expires_s
    }

    pub(crate) fn shown(&self) -> OpenInvitation {
        OpenInvitation {
            id: self.hash.id(),
            name: self.name.clone(),
            expires_s: self.expires_s,
        }
    }
}

/// The content of the file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StoredClients {
    #[serde(with = "client_list")]
    pub(crate) clients: BTreeMap<HostKey, EnrolledClient>,
    #[serde(default)]
    pub(crate) invitations: Vec<StoredInvitation>,
}

impl StoredClients {
    /// A name that no client has: the wanted one, or with a number.
    pub(crate) fn free_name(&self, wanted: &str) -> String {
        let is_taken = |name: &str| self.clients.values().any(|known| known.name == name);
        if !is_taken(wanted) {
            return wanted.to_owned();
        }
        let numbered = (2..).map(|n| format!("{wanted}-{n}"));
        let free = numbered.into_iter().find(|name| !is_taken(name));
        free.expect("there are more numbers than clients")
    }
}

/// Serde for clients: a list in the file, as older versions wrote it too.
mod client_list {
    use std::collections::BTreeMap;

    use d2tp_driver::HostKey;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::EnrolledClient;

    type ClientMap = BTreeMap<HostKey, EnrolledClient>;

    pub(super) fn serialize<S: Serializer>(clients: &ClientMap, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(clients.values())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ClientMap, D::Error> {
        let clients = Vec::<EnrolledClient>::deserialize(from)?;
        Ok(clients
            .into_iter()
            .map(|known| (known.key, known))
            .collect())
    }
}

/// The clients in a file; none if there is no file.
///
/// # Errors
/// The file cannot be read, or was not written by the proxy.
pub(crate) fn read_file(path: &Path) -> io::Result<StoredClients> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(StoredClients::default()),
        Err(error) => return Err(error),
    };
    serde_json::from_str(&text).map_err(|error| {
        let text = format!("{} is damaged: {error}", path.display());
        io::Error::new(ErrorKind::InvalidData, text)
    })
}

/// Replaces the file in one step.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write_file(path: &Path, stored: &StoredClients) -> Result<(), ClientStoreError> {
    let unwritable = |cause| ClientStoreError::Unwritable {
        path: path.display().to_string(),
        cause,
    };
    let text = serde_json::to_vec_pretty(stored).map_err(|error| unwritable(error.into()))?;
    replace_private(path, &text).map_err(unwritable)
}
