// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package version

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The linker takes the name of a variable that does not exist without a word.
func TestTheMakefileSetsTheRelease(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join("..", "..", "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(makefile), "-X stowage.dev/stowage/internal/version.release=$(VERSION)") {
		t.Error("the Makefile's LDFLAGS do not set the variable release of this package")
	}
	if want := "\nStowage " + release; !strings.HasSuffix(Beside(), want) {
		t.Errorf("%q, want it to end with %q", Beside(), want)
	}
}
