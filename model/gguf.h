/* model/gguf.h: a model in one GGUF file, as llama.cpp's tools write it: its config, tensors and tokenizer.

   https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Little-endian, version 2 or 3:
       char  magic[4]                "GGUF"
       u32   version
       u64   tensors, pairs          counts of what follows
       pairs: string key; u32 type; the value            a string is u64 length, then its bytes
       tensors: string name; u32 dimensions; u64 size[dimensions], the row's first; u32 type; u64 offset
       padding to a multiple of general.alignment (32), from where offsets count; the tensors' bytes

   The file is not trusted. One line of error says that the header goes on past its end, that a product overflows, or
   that a tensor is not one of the model's, is not aligned, ends past the file's end or overlaps another one.

   The tokenizer in the file is not built. It is compared with tokenizer.bin, which has Unicode's tables too, and must
   be the same: ids, texts and merges.
*/
#pragma once
#include "base/file.h"
#include "model/tensors.h"
#include "model/tokenizer.h"
#include <map>
#include <set>

// ------------------------------------------------------------------------------------------------------- Container

struct GgufValue {
    enum Type : uint32_t { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, NONE };
    Type type = NONE, item = NONE; // item: of an array
    uint64_t count = 0;            // of an array's items
    const uint8_t* data = nullptr; // a string or an array of strings: from its length on

    static size_t size_of(uint32_t type);
    explicit operator bool() const { return type != NONE; }
    bool integer(uint64_t* n) const;
    bool real(double* x) const;
    static std::string_view string_at(const uint8_t*& p);
    std::string_view string() const;
    // Calls f(i, text) for each item of an array of strings.
    template <class F> void each_string(F f) const {
        const uint8_t* p = data;
        for (uint64_t i = 0; i < count; i++) f(i, string_at(p));
    }
};

// The types of tensors by their number in the file. Types without a Dtype are listed so that an error can name them.
struct GgufType {
    const char* name = nullptr;
    Dtype dtype = Dtype::Other;
    size_t count = 0, bytes = 0; // numbers and bytes of a block
};
const GgufType* gguf_type(uint32_t number); // null: there is no such type
uint32_t gguf_number(Dtype dtype);          // of a type that GGUF has

struct GgufTensor {
    std::string name; // llama.cpp's
    Tensor tensor;
};

struct GgufFile {
    std::string path;
    std::map<std::string, GgufValue> values;
    std::vector<GgufTensor> tensors;

    explicit GgufFile(const MappedFile& map);
    const GgufValue& operator[](const std::string& key) const;
    // A whole number or a number that must be there.
    uint64_t integer(const std::string& key) const;
    double real(const std::string& key) const;
    [[noreturn]] void fail(const std::string& what) const { DIE("%s: %s", path.c_str(), what.c_str()); }

  private:
    const uint8_t *at, *end;            // the unread bytes
    std::vector<uint64_t> offsets;      // of the tensors
    size_t left() const { return (size_t)(end - at); }

    const uint8_t* skip(uint64_t bytes);
    template <class U> U take() { return load_as<U>(skip(sizeof(U))); }
    std::string string() {
        const uint64_t n = take<uint64_t>();
        return std::string((const char*)skip(n), n);
    }
    GgufValue value(const std::string& key);
    void read_entry();
    // Finds the tensors' bytes. They lie within the file, aligned, and not in each other.
    void place(const uint8_t* begin);
};

// ------------------------------------------------------------------------------------------- Config and tensors' names

// The config as Hugging Face's config.json has it, so that there is one reader of configs. Keys of the architecture
// that are not known may change the computation: they are refused by name.
std::string gguf_config(const GgufFile& g, int64_t vocabulary, bool tied);

// llama.cpp's name of a tensor.
std::string gguf_name(const ModelTensor& t);
// Hugging Face's name of it; "": there is none.
std::string hugging_face_name(const std::string& name);

// ------------------------------------------------------------------------------------------------------- Tokenizer

// The tokenizer stored in the file.
struct GgufVocabulary {
    std::string file, model, split, chat_template; // split: how text is cut into pieces, "qwen2"
    GgufValue tokens, types, merges;
    bool adds_token = false; // before every text

    explicit GgufVocabulary(const GgufFile& g);

    // How it differs from this one, in a few words; "": no difference.
    std::string difference(const Tokenizer& t) const;

    // The end tokens: the file's, and those that end a turn or a text by their names.
    std::vector<uint64_t> end_tokens(const GgufFile& g) const;
};

// The bytes of a token or a merge's part as byte-level vocabularies write it: each byte as a character, printable ones
// of Latin-1 as themselves, the other 68 as U+0100 and on. False: it has another character.
bool bytes_of(std::string_view text, std::string& out);
// The way back: the bytes as characters.
std::string characters_of(std::string_view bytes);

