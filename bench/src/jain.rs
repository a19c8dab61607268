//! Jain's fairness index: (Σx)² / (n·Σx²). It is 1 if all shares are equal, and 1/n if one has
//! everything.

/// Jain's fairness index of these shares; `None` if there are no shares or all are zero.
pub fn index(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|x| x * x).sum();
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

#[cfg(test)]
mod tests {
    use super::index;

    #[test]
    fn equal_shares_are_fair_and_one_taker_is_not() {
        assert_eq!(index(&[3.0; 7]), Some(1.0));
        assert_eq!(index(&[1.0, 0.0, 0.0, 0.0]), Some(0.25));
        // The example of the definition: two equal shares among four.
        assert_eq!(index(&[5.0, 5.0, 0.0, 0.0]), Some(0.5));
        assert_eq!(index(&[0.0; 3]), None);
        assert_eq!(index(&[]), None);
    }
}
