//! The options of requests to servers that `get`, `sync` and `url` share.

use std::path::PathBuf;

use cedos_agent::fetch::header;
use cedos_agent::order::TransferOrder;
use clap::Args;

use crate::help::TRUST;

/// What requests contain, and whom they trust.
#[derive(Debug, Args)]
pub struct RequestArgs {
    /// Add a header field to the requests, such as 'Accept: audio/mpeg'; repeatable. Fields that look like
    /// credentials are sent to no other server, and to no proxy (see --sealed)
    #[arg(short = 'H', long, value_name = "FIELD", value_parser = parse_header)]
    pub header: Vec<String>,

    /// Use the proxy only as a tunnel: with https it then sees nothing but host and port. Always on with
    /// credentials
    #[arg(long, help_heading = TRUST)]
    pub sealed: bool,

    /// Trust the certificate authorities in FILE (PEM) besides the system's
    #[arg(long, value_name = "FILE", help_heading = TRUST)]
    pub ca: Option<PathBuf>,

    /// Follow a redirect from https to http
    #[arg(long, help_heading = TRUST)]
    pub allow_downgrade: bool,
}

fn parse_header(text: &str) -> Result<String, String> {
    header::parse(text).map(|_| text.to_owned())
}

impl RequestArgs {
    /// Sets what an order says about its requests.
    pub fn apply_to(&self, order: &mut TransferOrder) {
        order.headers.clone_from(&self.header);
        order.sealed = self.sealed;
        order.ca.clone_from(&self.ca);
        order.allow_downgrade = self.allow_downgrade;
    }
}
