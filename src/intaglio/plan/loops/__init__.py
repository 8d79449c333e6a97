"""Loop schedules: rows, passes along them, values kept between passes."""
