package snapshot

import (
	"bytes"
	"encoding/json"
	"math/rand"
	"reflect"
	"strings"
	"testing"

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
	for _, k := range kinds {
		for i := range 40 {
			list := reflect.ValueOf(&Objects{}).Elem().FieldByName(strings.ToUpper(k.field[:1]) + k.field[1:])
			if k.field == "csiNodes" {
				list = reflect.ValueOf(&Objects{}).Elem().FieldByName("CSINodes")
			}
			filled := reflect.New(list.Type().Elem().Elem()).Interface()
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
				want := reflect.New(list.Type().Elem().Elem()).Interface()
				if err := utiljson.UnmarshalCaseSensitivePreserveInts([]byte(raw), want); err != nil {
					t.Fatalf("seed %d: %s, %s: %v", seed, k.field, name, err)
				}
				got := &Objects{}
				if err := k.decode(got, []json.RawMessage{[]byte(raw)}); err != nil {
					t.Fatalf("seed %d: %s, %s: %v", seed, k.field, name, err)
				}
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
		"many more":    {head + `,"nodes":[` + strings.Repeat("0,", 500001) + `0]}`, "500000"},
	} {
		_, err := Read(strings.NewReader(tc.content))
		if err == nil || !strings.Contains(err.Error(), tc.want) || strings.HasPrefix(err.Error(), "not an object in JSON: nodes") {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}
