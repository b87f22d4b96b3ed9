// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

const (
	suffix         = ".claim"
	previousSuffix = suffix + ".prev"
	separator      = "_"
	// allGPUs stands for every GPU of the node, in the name of a claim with too many to list.
	allGPUs = "all"
	// maxName leaves room below NAME_MAX (255) for the longest suffix that is ever appended.
	maxName = 255 - len(suffix) - len(".prev.tmp")
)

// validUID admits what API servers generate (and other names of letters, digits and dashes), nothing that
// could leave the folder or be taken for another part of the name.
var validUID = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,62}$`)

// ValidateUID says whether a claim UID may become part of a file's name.
func ValidateUID(uid types.UID) error {
	if !validUID.MatchString(string(uid)) {
		return fmt.Errorf("claim UID %q: only letters, digits and dashes, at most 63, can be part of a file name", uid)
	}
	return nil
}

// base returns the file name without suffix for a claim that holds the GPUs. GPU names are DNS labels
// (device names of the API), so the separator cannot occur in them.
func base(uid types.UID, gpus []string) string {
	name := strings.Join(append([]string{string(uid)}, slices.Sorted(slices.Values(gpus))...), separator)
	if len(name) > maxName {
		name = string(uid) + separator + allGPUs
	}
	return name
}

// parseBase is the reverse of base.
func parseBase(name string) (uid types.UID, gpus []string, all bool) {
	parts := strings.Split(name, separator)
	gpus = parts[1:]
	if len(gpus) == 1 && gpus[0] == allGPUs {
		return types.UID(parts[0]), nil, true
	}
	return types.UID(parts[0]), gpus, false
}
