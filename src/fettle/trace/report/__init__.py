"""What people see: charts, one self-contained HTML page (evidence first, no network, nothing executed from the trace),
and the trace written again for Perfetto. `page` writes the page; each other module holds a few of its sections,
`section` what a section is made of.
"""
