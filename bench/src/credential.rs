//! The receiver's certificate, made for one run, and TLS settings that trust only it.
//!
//! Every encrypted peer uses TLS 1.3, AES-128-GCM and `aws-lc-rs`. So differences between peers are
//! not differences between ciphers.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The name in the certificate. It is never resolved.
pub const SERVER_NAME: &str = "receiver.bench.invalid";

/// A self-signed certificate and its key, both DER.
#[derive(Debug)]
pub struct Credential {
    /// The certificate that the sender must trust.
    pub certificate: Vec<u8>,
    key: Vec<u8>,
    /// Both as PEM.
    texts: [String; 2],
}

impl Credential {
    /// Makes a new credential.
    pub fn make() -> Result<Self> {
        let made = rcgen::generate_simple_self_signed(vec![SERVER_NAME.to_owned()])
            .context("no certificate could be made for this run")?;
        Ok(Self {
            certificate: made.cert.der().to_vec(),
            key: made.signing_key.serialize_der(),
            texts: [made.cert.pem(), made.signing_key.serialize_pem()],
        })
    }

    /// Writes certificate and key into two files, as other programs read them.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_pem(&self, certificate: &Path, key: &Path) -> Result<()> {
        let [certificate_text, key_text] = &self.texts;
        fs::write(certificate, certificate_text)?;
        Ok(fs::write(key, key_text)?)
    }

    /// TLS settings of the receiver.
    pub fn server_config(&self) -> Result<ServerConfig> {
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from(self.certificate.clone())],
                PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.clone())),
            )?;
        Ok(config)
    }
}

/// TLS settings of a sender that trusts exactly `certificate`.
pub fn client_config(certificate: &[u8]) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from(certificate.to_vec()))
        .context("the receiver's certificate is not one")?;
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(config)
}

fn provider() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(provider)
}
