//! The device's side of a mailbox at the proxy.

use cedos_text::RemoteText;
use d2tp_driver::{Device, Flow, FlowSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::PairingError;

/// The most bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 16 * 1024;

/// The most bytes of an explanation that are read.
const WORDS_BYTES_MAX: u64 = 4_096;

/// Opens a mailbox. Returns its number, and the flow on which the other device will be heard.
///
/// # Errors
/// The proxy refuses, or cannot be asked.
pub async fn open(device: &Device) -> Result<(u32, Flow), PairingError> {
    let (head, flow) = ask(device, "*").await?;
    let fields = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let mut numbers = fields
        .filter(|(name, _)| name.eq_ignore_ascii_case("mailbox"))
        .filter_map(|(_, number)| number.trim().parse().ok());
    let number = numbers.next().ok_or(PairingError::OtherVersion)?;
    Ok((number, flow))
}

/// Joins the device that waits in a mailbox.
///
/// # Errors
/// No device waits there, the proxy refuses, or it cannot be reached.
pub async fn join(device: &Device, number: u32) -> Result<Flow, PairingError> {
    Ok(ask(device, &number.to_string()).await?.1)
}

async fn ask(device: &Device, which: &str) -> Result<(String, Flow), PairingError> {
    let settings = FlowSettings {
        reachable: true,
        ..FlowSettings::default()
    };
    let mut flow = device.open(settings).map_err(|_| PairingError::ProxyLost)?;
    let request = format!("MAILBOX {which} HTTP/1.1\r\nHost: *\r\n\r\n");
    let written = flow.write_all(request.as_bytes()).await;
    written.map_err(|_| PairingError::ProxyLost)?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() == HEAD_BYTES_MAX {
            return Err(PairingError::OtherVersion);
        }
        // Byte by byte: what follows the head is the other device's.
        head.push(flow.read_u8().await.map_err(|_| PairingError::ProxyLost)?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    match head.split(' ').nth(1) {
        Some("200") => Ok((head, flow)),
        Some("404") => Err(PairingError::NobodyWaits),
        _ => {
            let mut words = Vec::new();
            let _ = flow.take(WORDS_BYTES_MAX).read_to_end(&mut words).await;
            let words = String::from_utf8_lossy(&words);
            let words = RemoteText::new(words.trim()).to_string();
            Err(PairingError::Refused(words))
        }
    }
}
