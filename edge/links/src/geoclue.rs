//! Where this machine is, by GeoClue on the system bus.
//!
//! ```text
//!  GetClient ─▶ DesktopId, RequestedAccuracyLevel ─▶ Start ─▶ LocationUpdated ─▶ Latitude, Longitude, Accuracy
//! ```
//!
//! GeoClue asks the user's desktop whether `cedos` may know, and lists it among the programs that did.

use futures_util::StreamExt;
use zbus::{Connection, OwnedObjectPath, proxy};

/// The name by which GeoClue and the desktop know this program.
const DESKTOP_ID: &str = "cedos";
/// GeoClue's level for the exact position.
const EXACT: u32 = 8; // GClueAccuracyLevel

/// The part of GeoClue's manager interface that is used.
#[proxy(
    interface = "org.freedesktop.GeoClue2.Manager",
    default_service = "org.freedesktop.GeoClue2",
    default_path = "/org/freedesktop/GeoClue2/Manager"
)]
trait GeoClueManager {
    /// The client object of this connection.
    fn get_client(&self) -> zbus::Result<OwnedObjectPath>;
}

/// The part of GeoClue's client interface that is used.
#[proxy(
    interface = "org.freedesktop.GeoClue2.Client",
    default_service = "org.freedesktop.GeoClue2"
)]
trait GeoClueClient {
    /// Begins to measure positions.
    fn start(&self) -> zbus::Result<()>;

    /// The position moved.
    #[zbus(signal)]
    fn location_updated(&self, old: OwnedObjectPath, new: OwnedObjectPath) -> zbus::Result<()>;

    /// Which program asks.
    #[zbus(property)]
    fn set_desktop_id(&self, name: &str) -> zbus::Result<()>;

    /// How exact positions must be.
    #[zbus(property)]
    fn set_requested_accuracy_level(&self, level: u32) -> zbus::Result<()>;
}

/// The part of GeoClue's location interface that is used.
#[proxy(
    interface = "org.freedesktop.GeoClue2.Location",
    default_service = "org.freedesktop.GeoClue2"
)]
trait GeoClueLocation {
    /// Degrees north of the equator.
    #[zbus(property(emits_changed_signal = "false"))]
    fn latitude(&self) -> zbus::Result<f64>;

    /// Degrees east of Greenwich.
    #[zbus(property(emits_changed_signal = "false"))]
    fn longitude(&self) -> zbus::Result<f64>;

    /// How far the true position may be, in metres.
    #[zbus(property(emits_changed_signal = "false"))]
    fn accuracy(&self) -> zbus::Result<f64>;
}

/// Why GeoClue tells no position.
#[derive(Debug, thiserror::Error)]
#[error("GeoClue {doing}: {cause}")]
pub struct GeoClueError {
    doing: &'static str,
    cause: zbus::Error,
}

fn error_while(doing: &'static str) -> impl FnOnce(zbus::Error) -> GeoClueError {
    move |cause| GeoClueError { doing, cause }
}

/// A position that GeoClue measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredPosition {
    /// Degrees north of the equator.
    pub latitude: f64,
    /// Degrees east of Greenwich.
    pub longitude: f64,
    /// How far the true position may be, in metres.
    pub accuracy_m: f64,
}

/// A connection to GeoClue, which measures positions until this is dropped.
#[derive(Debug)]
pub struct GeoClue {
    bus: Connection,
    updates: LocationUpdatedStream,
}

impl GeoClue {
    /// Connects to GeoClue on a system bus connection of its own, since GeoClue stops when that ends.
    ///
    /// # Errors
    /// There is no bus or no GeoClue on it, or the user does not allow it.
    pub async fn system() -> Result<GeoClue, GeoClueError> {
        let bus = Connection::system().await;
        GeoClue::on(bus.map_err(error_while("is not reached"))?).await
    }

    /// Connects to GeoClue on a bus.
    ///
    /// # Errors
    /// There is no GeoClue on it, or the user does not allow it.
    pub async fn on(bus: Connection) -> Result<GeoClue, GeoClueError> {
        let absent = "is not reached";
        let manager = GeoClueManagerProxy::new(&bus).await;
        let path = manager.map_err(error_while(absent))?.get_client().await;
        let client = GeoClueClientProxy::builder(&bus)
            .path(path.map_err(error_while(absent))?)
            .build()
            .await
            .map_err(error_while(absent))?;
        let updates = client.receive_location_updated().await;
        let updates = updates.map_err(error_while("does not tell positions"))?;
        let refused = "refuses";
        let named = client.set_desktop_id(DESKTOP_ID).await;
        named.map_err(error_while(refused))?;
        let exact = client.set_requested_accuracy_level(EXACT).await;
        exact.map_err(error_while(refused))?;
        client.start().await.map_err(error_while(refused))?;
        Ok(GeoClue { bus, updates })
    }

    /// The next position; none when GeoClue or the bus has ended.
    pub async fn next(&mut self) -> Option<MeasuredPosition> {
        loop {
            let update = self.updates.next().await?;
            let Ok(update) = update.args() else { continue };
            match self.read(&update.new).await {
                Ok(position) => return Some(position),
                // A newer one may have replaced it.
                Err(error) => tracing::debug!(%error, "GeoClue's position is not read"),
            }
        }
    }

    async fn read(&self, path: &OwnedObjectPath) -> zbus::Result<MeasuredPosition> {
        let location = GeoClueLocationProxy::builder(&self.bus)
            .path(path.clone())
            .build()
            .await?;
        Ok(MeasuredPosition {
            latitude: location.latitude().await?,
            longitude: location.longitude().await?,
            accuracy_m: location.accuracy().await?,
        })
    }
}
