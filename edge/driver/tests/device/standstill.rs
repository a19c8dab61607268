//! A process that stood still, as on a machine that gives it no processor.

use std::sync::mpsc;
use std::time::Duration;

use d2tp_driver::{Device, DeviceOptions, FlowSettings, PathSelection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{options_at, server};

const BYTES: usize = 3_000; // two packets and a part

/// Exchanges of a byte before that.
const ROUNDS: usize = 50;

/// Longer than a probe timeout on loopback, and shorter than a silence.
const STANDSTILL: Duration = Duration::from_millis(150);

/// A device in a thread of its own, which reads all bytes and tells so. It returns how many bytes came
/// again after that.
fn reader(options: DeviceOptions, has_all: mpsc::Sender<()>) -> std::thread::JoinHandle<u64> {
    let body = async move {
        let device = Device::new(options).await.unwrap();
        device.use_default_route().unwrap();
        let mut flow = device.open(FlowSettings::default()).unwrap();
        flow.write_all(b"!").await.unwrap();
        for _ in 0..ROUNDS {
            flow.read_u8().await.unwrap();
            flow.write_all(b"!").await.unwrap();
        }
        flow.read_exact(&mut [0; BYTES]).await.unwrap();
        // What the server repeated while it ran, on a busy machine, came before.
        let before = device.duplicate_bytes();
        // A packet with bytes has the acknowledgement, too.
        flow.write_all(b"!").await.unwrap();
        tokio::task::yield_now().await;
        has_all.send(()).unwrap();
        flow.read_u8().await.unwrap();
        device.duplicate_bytes() - before
    };
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(body)
    })
}

#[tokio::test]
async fn a_server_that_stood_still_sends_nothing_again_that_was_acknowledged_meanwhile() {
    let server = server();
    let (has_all, told) = mpsc::channel();
    let reader = reader(options_at(server.local_addr().port(), &server), has_all);
    let mut far = server.accept().await.unwrap();
    // The round trip, and so the probe timeout, is known to be short.
    far.read_u8().await.unwrap();
    for _ in 0..ROUNDS {
        far.write_all(b"?").await.unwrap();
        far.read_u8().await.unwrap();
    }
    far.write_all(&[7; BYTES]).await.unwrap();
    // The bytes leave in this turn.
    tokio::task::yield_now().await;
    told.recv().unwrap();
    // sleep: that the process stands still for so long is the subject
    std::thread::sleep(STANDSTILL);
    // Anything wakes the engine's task, before the runtime has asked the kernel what arrived.
    far.set_route(PathSelection::Any);
    tokio::task::yield_now().await;
    far.write_all(b"!").await.unwrap();
    let repeated = tokio::task::spawn_blocking(|| reader.join().unwrap());
    assert_eq!(repeated.await.unwrap(), 0);
}
