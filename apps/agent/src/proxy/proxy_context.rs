//! What all connections of the local proxy share.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::conn_options::ConnOptions;
use super::proxy_session::{ProxyConnection, ProxySession};
use super::refusal::{ConnectRefusal, RefusalCause};
use super::target::{NameLookup, TargetAddress};

/// How long a client may take to send its request.
pub(super) const HELLO_WITHIN: Duration = Duration::from_secs(30); // a guess

/// What the connections of the port share.
pub(super) struct ProxyContext {
    pub(super) session: Arc<ProxySession>,
    pub(super) options: ConnOptions,
    pub(super) names: Option<Arc<dyn NameLookup>>,
    /// Streams of HTTP/2, of all connections together.
    pub(super) http2_streams: Arc<Semaphore>,
}

impl ProxyContext {
    pub(super) async fn open(
        &self,
        host: &str,
        port: u16,
        conn_options: ConnOptions,
    ) -> Result<ProxyConnection, ConnectRefusal> {
        self.session
            .open(&self.target(host, port)?, conn_options)
            .await
    }

    /// The target that a client asks for.
    pub(super) fn target(&self, host: &str, port: u16) -> Result<TargetAddress, ConnectRefusal> {
        let nonsense = |text| ConnectRefusal::new(RefusalCause::BadRequest, text);
        let mut target = TargetAddress::new(host, port).map_err(nonsense)?;
        if let (Some(names), Ok(ip)) = (&self.names, target.host.parse()) {
            let unknown = |text| ConnectRefusal::new(RefusalCause::Unreachable, text);
            if let Some(name) = names.name_of(ip).map_err(unknown)? {
                target.host = name;
            }
        }
        Ok(target)
    }
}
