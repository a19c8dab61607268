//! Where the device is, by gpsd.
//!
//! ```text
//!  gpsd ── {"class":"TPV","mode":3,"lat":52.5,"lon":13.4} ⏎ ──▶ DevicePoint ──▶ squares of 100 m in LinkHistoryStore
//! ```
//!
//! Points stay on this device: they are kept as squares, with the outages that began there.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;

use super::device_point::DevicePoint;

/// What makes gpsd send reports.
const WATCH: &[u8] = b"?WATCH={\"enable\":true,\"json\":true};\n";
/// The longest report that is read; gpsd's own limit is less.
const LINE_BYTES_MAX: u64 = 16 * 1024;
/// How soon gpsd is asked again that is not there.
const AGAIN: Duration = Duration::from_secs(10); // a guess: a receiver that is plugged in on the way
/// Tells points until nobody asks for them any more.
pub(super) async fn follow(at: SocketAddr, tell: watch::Sender<Option<DevicePoint>>) {
    loop {
        if let Err(error) = read_points(at, &tell).await {
            tracing::debug!(%at, %error, "gpsd tells no position");
        }
        if tell.is_closed() {
            return;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn read_points(
    at: SocketAddr,
    tell: &watch::Sender<Option<DevicePoint>>,
) -> std::io::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect(at).await?);
    stream.write_all(WATCH).await?;
    stream.flush().await?;
    let mut line = String::new();
    loop {
        line.clear();
        let mut limited = (&mut stream).take(LINE_BYTES_MAX);
        if limited.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        if let Some(point) = point_in(&line) {
            tell.send_replace(Some(point));
        }
    }
}

/// The point in a report, if it has one.
fn point_in(line: &str) -> Option<DevicePoint> {
    let report: Value = serde_json::from_str(line).ok()?;
    // Two and three: a position, without and with an altitude.
    let has_fix = report["class"] == "TPV" && report["mode"].as_u64() >= Some(2);
    let degrees = |name: &str| report[name].as_f64().filter(|_| has_fix);
    DevicePoint::of(degrees("lat")?, degrees("lon")?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_position_of_gpsd_becomes_a_point_and_what_is_none_is_left_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (tell, mut told) = watch::channel(None);
        let follows = tokio::spawn(follow(at, tell));
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut asked = String::new();
        stream.read_line(&mut asked).await.unwrap();
        assert_eq!(asked.as_bytes(), WATCH);
        for line in [
            r#"{"class":"VERSION","release":"3.22"}"#,
            r#"{"class":"TPV","mode":1}"#,
            r#"{"class":"TPV","mode":3,"lat":"north","lon":13.4}"#,
            r#"{"class":"TPV","mode":3,"lat":1e300,"lon":13.4}"#,
            "nonsense",
            r#"{"class":"TPV","mode":3,"lat":52.5,"lon":13.4}"#,
        ] {
            let line = format!("{line}\n");
            stream.write_all(line.as_bytes()).await.unwrap();
        }
        stream.flush().await.unwrap();
        told.changed().await.unwrap();
        let point = told.borrow_and_update().expect("a point");
        let (east, north) = point.now().expect("a fresh one");
        assert!((north - 5_844_300.0).abs() < 1.0, "{north}");
        assert!((east - 897_752.0).abs() < 2_000.0, "{east}");
        follows.abort();
    }
}
