// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package answers

import (
	"encoding/binary"
	"testing"
)

// Nodes beyond are searched each for itself; what is known stays known.
func TestAnswersAreBounded(t *testing.T) {
	var known Table
	printOf := func(i int) (f Fingerprint) {
		binary.BigEndian.PutUint32(f[:], uint32(i))
		return f
	}
	for i := range maxAnswers {
		if a, mine := known.Take(printOf(i), nil); a == nil || !mine {
			t.Fatalf("no room for answer %d", i)
		}
	}
	if a, mine := known.Take(printOf(maxAnswers), nil); a != nil || mine {
		t.Error("there is room for one more")
	}
	if a, mine := known.Take(printOf(0), nil); a == nil || mine {
		t.Error("what is known is forgotten")
	}
}
