//! Queues desktop notifications, which [`super::notifications`] shows.

use tokio::sync::mpsc;

/// Notifications that wait to be shown; more are dropped.
const QUEUE_MAX: usize = 64;

/// A notification for the user.
#[derive(Debug)]
pub(super) enum DesktopNotification {
    Cap(String),
    Ended {
        id: u64,
        name: String,
        fault: Option<String>,
    },
    Hardly {
        id: u64,
        name: String,
        text: String,
    },
}

/// Sends notifications to the queue.
#[derive(Debug, Clone)]
pub struct DesktopNotifier {
    news: mpsc::Sender<DesktopNotification>,
}

/// The queue of notifications, for [`super::notifications::serve`].
pub struct NotificationQueue(pub(super) mpsc::Receiver<DesktopNotification>);

impl DesktopNotifier {
    /// A notifier, and the queue that its notifications are taken from.
    pub fn new() -> (DesktopNotifier, NotificationQueue) {
        let (news, inbox) = mpsc::channel(QUEUE_MAX);
        (DesktopNotifier { news }, NotificationQueue(inbox))
    }

    fn show(&self, news: DesktopNotification) {
        // Full, or nobody is there to be told.
        let _ = self.news.try_send(news);
    }

    /// Notifies that a cap is reached.
    pub fn cap_reached(&self, text: &str) {
        self.show(DesktopNotification::Cap(text.to_owned()));
    }

    /// Notifies that a transfer ended; `fault`: why it is incomplete.
    pub fn ended(&self, id: u64, name: &str, fault: Option<&str>) {
        self.show(DesktopNotification::Ended {
            id,
            name: name.to_owned(),
            fault: fault.map(str::to_owned),
        });
    }

    /// Notifies that a transfer will probably be late.
    pub fn likely_late(&self, id: u64, name: &str, text: &str) {
        self.show(DesktopNotification::Hardly {
            id,
            name: name.to_owned(),
            text: text.to_owned(),
        });
    }
}
