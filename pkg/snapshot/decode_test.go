// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	"k8s.io/client-go/kubernetes/scheme"
	utiljson "sigs.k8s.io/json"
)

// Objects are read as the API server's own decoder reads them: with random contents, fields that are not known, or null, or spelled otherwise,
// and with two of one name.
func TestObjectsAreDecodedAsByKubernetes(t *testing.T) {
	seed := rand.Int63()
	random := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(seed),
		scheme.Codecs)
	options := remembering()
	for _, k := range kinds {
		for i := range 40 {
			list := listOf(&Objects{}, k.field)
			filled := newOf(list)
			random.Fill(filled)
			reflect.ValueOf(filled).Elem().FieldByName("ObjectMeta").FieldByName("Name").SetString("some")
			raw, err := json.Marshal(filled)
			if err != nil {
				t.Fatalf("seed %d: %s: %v", seed, k.field, err)
			}
			var spaced bytes.Buffer
			if err := json.Indent(&spaced, raw, "", "\t"); err != nil {
				t.Fatal(err)
			}
			for name, raw := range map[string]string{
				"as it is": string(raw), "a field that nobody knows": `{"newer":{"a":[null,1e99,"x"]},` + string(raw)[1:],
				"null": `{"status":null,"spec":null,` + string(raw)[1:], "another case": `{"METADATA":{"name":"other"},` + string(raw)[1:],
				"twice": `{"metadata":{"name":"first"},` + string(raw)[1:], "spaces": spaced.String(),
				"a string that is no UTF-8": strings.Replace(string(raw), `"some"`, "\"s\xffme\"", 1),
			} {
				want := newOf(list)
				if err := utiljson.UnmarshalCaseSensitivePreserveInts([]byte(raw), want); err != nil {
					t.Fatalf("seed %d: %s, %s: %v", seed, k.field, name, err)
				}
				got := &Objects{}
				put, err := k.decode(options, 0, []json.RawMessage{[]byte(raw)})
				if err != nil {
					t.Fatalf("seed %d: %s, %s: %v", seed, k.field, name, err)
				}
				put(got)
				if have := k.names(got)[0]; !reflect.DeepEqual(want, any(have)) {
					t.Fatalf("seed %d: %s[%d], %s: %s", seed, k.field, i, name, cmp.Diff(want, any(have)))
				}
			}
		}
	}
}

// A file may be from somebody else, of another version, or cut off: the object, the field and the value are named.
func TestWhatIsWrongInAFileIsNamed(t *testing.T) {
	const head = `{"apiVersion":"stowage.dev/v1alpha1","kind":"ClusterSnapshot"`
	many := strings.Repeat(`{"metadata":{"name":"a"}},`, 600)
	for name, tc := range map[string]struct{ content, want string }{
		"a slash":      {head + `,"nodes":[{"metadata":{"name":"a"},"status":{"allocatable":{"nvidia.com/gpu":"many"}}}]}`, "nvidia.com/gpu"},
		"an index":     {head + `,"nodes":[{"metadata":{"name":"a"},"spec":{"taints":[{"key":1}]}}]}`, "spec.taints[0].key"},
		"out of range": {head + `,"pods":[{"metadata":{"name":"a","uid":"u"},"spec":{"priority":99999999999}}]}`, "99999999999"},
		"a fraction":   {head + `,"pods":[{"metadata":{"name":"a","uid":"u"},"spec":{"priority":1.5}}]}`, "1.5"},
		"newer file":   {`{"apiVersion":"stowage.dev/v9","kind":"ClusterSnapshot","nodes":{"a":{}}}`, "apiVersion"},
		"not a list":   {head + `,"nodes":{}}`, `nodes: want a list`},
		"a time":       {head + `,"nodes":[{"metadata":{"name":"a","creationTimestamp":"now"}}]}`, "creationTimestamp"},
		"syntax":       {head + `,"nodes":[{"metadata":{"name":"a"} "spec":{}}]}`, "nodes[0]"},
		"truncated":    {head + `,"nodes":[{"metadata":{"name":"a"}}],"pods":[{"metadata":{"na`, "too early"},
		"far behind":   {head + `,"nodes":[` + many + `{"metadata":{"name":"b"},"spec":{"unschedulable":7}}]}`, "nodes[600] (b): spec.unschedulable"},
		"the first":    {head + `,"nodes":[` + many + `{"spec":{}},` + many + `{"spec":{}}]}`, "nodes[600]: metadata.name"},
		"many more":    {head + `,"nodes":[` + strings.Repeat("0,", 500001) + `0]}`, "500000"},
	} {
		_, err := Read(strings.NewReader(tc.content))
		if err == nil || !strings.Contains(err.Error(), tc.want) || strings.HasPrefix(err.Error(), "not an object in JSON: nodes") {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// Objects of a file that have parts in common are read as each alone, and as the API server's own decoder reads them. What one object adds
// to such a part, because its text has it twice, no other one has.
func TestAFileIsReadAsByKubernetes(t *testing.T) {
	seed := rand.Int63()
	source := rand.NewSource(seed)
	random, filler := rand.New(source), fuzzer.FuzzerFor(metafuzzer.Funcs, source, scheme.Codecs)
	for _, k := range kinds {
		fields := map[string][]json.RawMessage{} // what objects of the kind have, by field
		for range 4 {
			filled := newOf(listOf(&Objects{}, k.field))
			filler.Fill(filled)
			for field, text := range membersOf(t, filled) {
				fields[field] = append(fields[field], text)
			}
		}
		delete(fields, "metadata")
		var texts []string
		for i := range 3 * tried {
			text := fmt.Sprintf(`{"metadata":{"namespace":"n","name":"name-%05d","uid":"uid-%d"}`, i, i)
			for field, of := range fields {
				times := 1
				if i%7 == 0 {
					times = 2
				}
				for range times {
					text += fmt.Sprintf(",%q:%s", field, of[random.Intn(len(of))])
				}
			}
			texts = append(texts, text+"}")
		}
		content := fmt.Sprintf(`{"apiVersion":%q,"kind":%q,%q:[%s]}`, APIVersion, Kind, k.field, strings.Join(texts, ","))
		got, err := Read(strings.NewReader(content))
		if err != nil {
			t.Fatalf("seed %d: %s: %v", seed, k.field, err)
		}
		list := listOf(&got.Objects, k.field)
		if list.Len() != len(texts) {
			t.Fatalf("seed %d: %d %s, want %d", seed, list.Len(), k.field, len(texts))
		}
		for i, text := range texts {
			have, alone, want := list.Index(i).Interface(), newOf(list), newOf(list)
			if err := jsonv2.Unmarshal([]byte(text), alone, asTheAPIServerDoes); err != nil {
				t.Fatalf("seed %d: %s[%d]: %v", seed, k.field, i, err)
			}
			if !reflect.DeepEqual(alone, have) {
				t.Fatalf("seed %d: %s[%d] is not what it is alone: %s", seed, k.field, i, cmp.Diff(alone, have))
			}
			if i%7 == 0 { // of two lists Kubernetes mixes the elements
				continue
			}
			if err := utiljson.UnmarshalCaseSensitivePreserveInts([]byte(text), want); err != nil {
				t.Fatalf("seed %d: %s[%d]: %v", seed, k.field, i, err)
			}
			if !reflect.DeepEqual(want, have) {
				t.Fatalf("seed %d: %s[%d]: %s", seed, k.field, i, cmp.Diff(want, have))
			}
		}
	}
}

// newOf makes an object of a list's kind.
func newOf(list reflect.Value) any { return reflect.New(list.Type().Elem().Elem()).Interface() }

// listOf is the list of a kind.
func listOf(o *Objects, field string) reflect.Value {
	name := strings.ToUpper(field[:1]) + field[1:]
	if field == "csiNodes" {
		name = "CSINodes"
	}
	return reflect.ValueOf(o).Elem().FieldByName(name)
}

// membersOf are the fields of an object, as JSON.
func membersOf(t *testing.T, object any) (fields map[string]json.RawMessage) {
	t.Helper()
	text, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(text, &fields)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fields
}

// However a file comes, in pieces of any size and with values of any size, it is divided alike, and nothing that is decoded
// changes when its block is used again.
func TestAFileThatComesInPieces(t *testing.T) {
	var all strings.Builder
	fmt.Fprintf(&all, ` {"apiVersion":%q , "kind":%q,"taken":"2026-01-02T03:04:05Z","nodes":[`, APIVersion, Kind)
	for i := range 3 * atOnce { // some larger than a block
		label := strings.Repeat(`\\\"x`, 1+(i%7)*(i%11))
		if i%200 == 199 {
			label = strings.Repeat("long ", blockBytes/4)
		}
		if i > 0 {
			all.WriteString(" ,\n")
		}
		fmt.Fprintf(&all, `{"metadata":{"name":"node-%05d","labels":{"a":"%s"}},"spec":{"unschedulable":%t}}`, i, label, i%2 == 0)
	}
	all.WriteString(`] , "namespaces":[{"metadata":{"name":"n"}}], "hashedNames" :true } `)
	want, err := Read(strings.NewReader(all.String()))
	if err != nil {
		t.Fatal(err)
	}
	for i, node := range want.Nodes {
		if node.Name != fmt.Sprintf("node-%05d", i) || node.Spec.Unschedulable != (i%2 == 0) {
			t.Fatalf("node %d is %s, unschedulable: %t", i, node.Name, node.Spec.Unschedulable)
		}
	}
	seed := rand.Int63()
	random := rand.New(rand.NewSource(seed))
	for name, reader := range map[string]io.Reader{
		"byte by byte":   iotest.OneByteReader(strings.NewReader(all.String())),
		"half at a time": iotest.HalfReader(strings.NewReader(all.String())),
		"with its end":   iotest.DataErrReader(strings.NewReader(all.String())),
		"at random":      &randomReader{strings.NewReader(all.String()), random},
	} {
		got, err := Read(reader)
		if err != nil {
			t.Fatalf("seed %d: %s: %v", seed, name, err)
		}
		if !reflect.DeepEqual(want, got) {
			t.Errorf("seed %d: %s: %s", seed, name, cmp.Diff(want, got))
		}
	}
	broken := errors.New("the disk is gone")
	for i, failing := range []io.Reader{
		iotest.ErrReader(broken), io.MultiReader(strings.NewReader(all.String()[:all.Len()/2]), iotest.ErrReader(broken)),
		io.MultiReader(strings.NewReader("a: "), iotest.ErrReader(broken)),
	} {
		if _, err := Read(failing); !errors.Is(err, broken) || err.Error() != broken.Error() {
			t.Errorf("reader %d that fails: %v", i, err)
		}
	}
}

// randomReader reads up to some bytes.
type randomReader struct {
	io.Reader
	random *rand.Rand
}

func (r *randomReader) Read(p []byte) (int, error) {
	return r.Reader.Read(p[:min(len(p), 1+r.random.Intn(100_000))])
}
