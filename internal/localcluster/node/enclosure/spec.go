// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package enclosure

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

// cgroupName keeps the janitor, which kills all that it finds below the cgroup, away from everybody else's.
var cgroupName = regexp.MustCompile(`^/stowage-[a-z0-9.-]+$`)

// Spec is what the janitor is told to make, and to remove in the end.
type Spec struct {
	// Binds are mounted in their order, inside the enclosure only.
	Binds []Bind `json:"binds"`
	// Cgroup is the path of the node's cgroup below each hierarchy's root, for instance "/stowage-node-1".
	Cgroup string `json:"cgroup"`
}

// Bind lets Target show what is at Source. Both are absolute.
type Bind struct {
	Source string `json:"source"`
	// Target is made when it is missing, as a folder, and then removed in the end if it is empty.
	Target string `json:"target"`
}

// WriteFile stores the spec for the janitor to read.
func (s Spec) WriteFile(path string) error {
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o600)
}

// ReadSpec reads what WriteFile has written.
func ReadSpec(path string) (Spec, error) {
	var s Spec
	data, err := os.ReadFile(path)
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("reading %s: %w", path, err)
	}
	return s, s.validate()
}

func (s Spec) validate() error {
	if !cgroupName.MatchString(s.Cgroup) {
		return fmt.Errorf("cgroup %q: want /stowage-<name>", s.Cgroup)
	}
	for _, b := range s.Binds {
		if !filepath.IsAbs(b.Source) || !filepath.IsAbs(b.Target) {
			return fmt.Errorf("mount of %q at %q: both paths must be absolute", b.Source, b.Target)
		}
	}
	return nil
}
