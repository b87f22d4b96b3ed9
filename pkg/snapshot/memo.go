// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"errors"
	"reflect"

	jsonv2 "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxKnown bounds what is remembered of a type, and tried is after how many texts it has to have paid off.
const (
	maxKnown = 4096
	tried    = 512
)

// remembering returns options that decode equal texts of types that repeat from object to object once: containers of pods of one job,
// attributes of GPUs of one model. Objects share these parts, which nobody changes. One goroutine uses the options.
func remembering() jsonv2.Options {
	return jsonv2.JoinOptions(asTheAPIServerDoes, jsonv2.WithUnmarshalers(jsonv2.JoinUnmarshalers(
		once[[]v1.Container](), once[[]v1.Toleration](), once[v1.Affinity](), once[v1.NodeSelector](), once[v1.ResourceList](),
		once[resourceapi.ResourceClaimSpec](), once[resourceapi.DeviceAttribute](),
		once[map[resourceapi.QualifiedName]resourceapi.DeviceCapacity](), once[resource.Quantity](), once[metav1.Time](),
	)))
}

// errShared is what an object is refused with that gives one field twice, which would add to what others share.
var errShared = errors.New("objects share it")

// once decodes equal texts once. A type whose texts are mostly different is decoded as ever.
func once[T any]() *jsonv2.Unmarshalers {
	known := map[string]T{}
	asked, found := 0, 0
	return jsonv2.UnmarshalFromFunc(func(decoder *jsontext.Decoder, value *T) error {
		switch {
		case !reflect.ValueOf(value).Elem().IsZero():
			return errShared
		case asked >= tried && found < asked/2:
			return jsonv2.SkipFunc
		}
		text, err := decoder.ReadValue()
		if err != nil {
			return err
		}
		asked++
		if same, ok := known[string(text)]; ok {
			found++
			*value = same
			return nil
		}
		if err := jsonv2.Unmarshal(text, value, asTheAPIServerDoes); err != nil {
			return err
		}
		if len(known) < maxKnown {
			known[string(text)] = *value
		}
		return nil
	})
}
