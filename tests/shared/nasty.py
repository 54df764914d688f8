"""A token that would run script in a careless page."""

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028\u202e\"'`${x}"
