package install

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What a library that was installed does is tried in cmd/nvmlsim-library.

func TestWhatCannotBeInstalledIsRefused(t *testing.T) {
	write := func(content []byte) string {
		path := filepath.Join(t.TempDir(), "library")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	self, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	tests := map[string]struct {
		from, version string
		is            error
		says          string
	}{
		"a version of no form":      {write(self), "570", nil, `driver version "570": want one such as 570.172.08`},
		"no version":                {write(self), "", nil, `driver version ""`},
		"no file":                   {filepath.Join(t.TempDir(), "none"), "570.1", os.ErrNotExist, "none"},
		"no library":                {write([]byte("text")), "570.1", ErrNotSimulated, "library: not a simulated"},
		"a program that is no NVML": {write(self), "570.1", ErrNotSimulated, "library: not a simulated"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			err := Library(test.from, to, test.version)
			if err == nil || test.is != nil && !errors.Is(err, test.is) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("%v, want %v that says %q", err, test.is, test.says)
			}
			if left, err := os.ReadDir(filepath.Dir(to)); err != nil || len(left) > 0 {
				t.Errorf("%v is left, %v", left, err)
			}
		})
	}
}

func TestWhatADriverLacks(t *testing.T) {
	for _, test := range []struct {
		function, version string
		missing           bool
	}{
		{"nvmlInit_v2", "450.1", false},
		{"nvmlDeviceGetAddressingMode", "575.57.08", true},
		{"nvmlDeviceGetAddressingMode", "580.65.06", false},
		{"nvmlDeviceGetMarginTemperature", "570.172.08", false},
		{"nvmlDeviceGetMarginTemperature", "565.57.01", true},
		{"nvmlDeviceGetAddressingMode", "any", false},
	} {
		if got := Missing(test.function, test.version); got != test.missing {
			t.Errorf("%s in %s: missing %t, want %t", test.function, test.version, got, test.missing)
		}
	}
}
