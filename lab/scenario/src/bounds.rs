//! Range checks of numbers in a scenario file.

/// Checks that a time in seconds is within its limits.
///
/// # Errors
/// The key and the value, for the author of the file.
pub(crate) fn seconds(key: &str, value: f64, max: f64) -> Result<(), String> {
    if (0.0..=max).contains(&value) {
        Ok(())
    } else {
        Err(format!("{key} is {value}, expected 0 to {max} seconds"))
    }
}
