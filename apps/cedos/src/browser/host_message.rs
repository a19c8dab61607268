//! The messages of native messaging: a length of four bytes in this machine's order, and that much JSON.

use std::io;

use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The most bytes of a message; browsers accept no more from us either.
pub const MESSAGE_BYTES_MAX: u32 = 1024 * 1024;

/// A request of the extension.
#[derive(Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum HostRequest {
    /// Asks whether the agent is there.
    Hello,
    /// Asks for a link of the agent's page that works once.
    Page,
    /// Hands a download over.
    Download(BrowserDownload),
}

/// A download, as the browser would ask for it.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BrowserDownload {
    /// The URL, http:// or https://.
    pub url: String,
    /// The page that the link is on.
    #[serde(default)]
    pub referrer: Option<String>,
    /// The cookies that the browser would send.
    #[serde(default)]
    pub cookies: Option<String>,
    /// The name that the browser gives itself.
    #[serde(default)]
    pub user_agent: Option<String>,
}

impl BrowserDownload {
    /// The header fields of the request.
    pub fn headers(&self) -> Vec<String> {
        let fields = [
            ("Referer", &self.referrer),
            ("Cookie", &self.cookies),
            ("User-Agent", &self.user_agent),
        ];
        let present = fields.into_iter().filter_map(|(name, value)| {
            let value = value.as_deref().filter(|value| !value.is_empty())?;
            Some(format!("{name}: {value}"))
        });
        present.collect()
    }
}

/// Reads the next message; none when the browser has closed its end.
///
/// # Errors
/// The message is longer than it may be, or ends early.
pub async fn read_message(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match input.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    };
    let length = u32::from_ne_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::other(format!(
            "a message of {length} bytes is longer than {MESSAGE_BYTES_MAX}"
        )));
    }
    let mut message = vec![0; length as usize];
    input.read_exact(&mut message).await?;
    Ok(Some(message))
}

/// Writes a message.
///
/// # Errors
/// The browser is gone.
pub async fn write_message(
    output: &mut (impl AsyncWrite + Unpin),
    message: &Value,
) -> io::Result<()> {
    let text = message.to_string();
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    output.write_all(&length.to_ne_bytes()).await?;
    output.write_all(text.as_bytes()).await?;
    output.flush().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn a_message_is_read_as_it_was_written_and_the_end_is_no_error() {
        let mut bytes = Vec::new();
        write_message(&mut bytes, &json!({"do": "hello"}))
            .await
            .unwrap();
        let mut input = &bytes[..];
        let read = read_message(&mut input).await.unwrap().expect("a message");
        let request: HostRequest = serde_json::from_slice(&read).unwrap();
        assert_eq!(request, HostRequest::Hello);
        assert!(read_message(&mut input).await.unwrap().is_none());
        let mut cut = &bytes[..6];
        assert!(read_message(&mut cut).await.is_err());
        let mut endless = &u32::MAX.to_ne_bytes()[..];
        let error = read_message(&mut endless).await.unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }

    #[test]
    fn a_request_with_an_unknown_field_is_refused() {
        let read = |text: &str| serde_json::from_str::<HostRequest>(text);
        let download =
            read(r#"{"do":"download","url":"https://o/a","cookies":"a=b","referrer":""}"#);
        let HostRequest::Download(download) = download.unwrap() else {
            panic!("another request");
        };
        assert_eq!(download.headers(), ["Cookie: a=b"]);
        assert!(read(r#"{"do":"download","url":"https://o/a","file":"/etc/passwd"}"#).is_err());
        assert!(read(r#"{"do":"add","order":{}}"#).is_err());
    }
}
