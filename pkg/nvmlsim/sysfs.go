package nvmlsim

import (
	"io/fs"
	"testing/fstest"
)

// Sysfs returns a tree like the machine's /sys.
func (l *Library) Sysfs() fs.ReadLinkFS { return fstest.MapFS{} }
